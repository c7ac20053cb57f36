"""The log over HTTP: publish now or with a delay, and read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from custody.engine import Custody
from custody.errors import CustodyError, InvalidArgument, OffsetConflict
from custody.model.entities import Delayed, Message, Outgoing, Payload, Receipt, batch_of
from custody.model.limits import LARGEST, MOST
from custody.model.policy import Policy
from custody.remote.base import RemoteBase, require_topic, topic_path
from custody.remote.derived import prepared, special
from custody.remote.own_producers import OwnProducers, unknown_publish
from custody.remote.transport import Transport, Tries
from custody.remote.values import outgoing
from custody.tracing import traced
from custody.verbs.producer import producer_identity
from custody.wire.messages import MessageOut, ReceiptsOut
from custody.wire.requests import PublishIn
from custody.wire.verb import Verb

MAY_BE_CUT = 2**20
"""Bytes: a server cuts an answer at 16 MB. A shorter page of at least this size may have been cut, so read on."""


class RemotePublishing(RemoteBase):
    """Publishing and reading messages. Publishes are sent under a producer, so that repeats have no effect."""

    def __init__(self, transport: Transport, *, defaults: Policy | None = None, worker: str | None = None) -> None:
        super().__init__(transport, defaults=defaults, worker=worker)
        self._own = OwnProducers(self._init_own, self._forget_own)

    def close(self) -> None:
        """Removes this client's producers from the server, and closes the connections."""
        self._own.close()
        super().close()

    def _init_own(self, producer_id: str) -> int:
        return self.new_epoch(producer_id).epoch

    def _forget_own(self, producer_id: str, **patience: float) -> None:
        # safe to repeat: the id is unique, and is not used again
        self._call("DELETE", f"/producers/{producer_id}", type(None), repeat=True, **patience)

    def publish_many(
        self,
        topic: str,
        messages: Iterable[Outgoing | Payload],
        *,
        expected_offset: int | None = None,
        producer_id: str | None = None,
        epoch: int | None = None,
        sequence: int | None = None,
    ) -> list[Receipt]:
        """As with a direct connection. It is one request: a batch above the limits of the server is `too_large`."""
        batch = traced(batch_of(messages))
        if any(message.delayed for message in batch):
            raise InvalidArgument(
                "a delayed message has no offset to return", "Use publish_delayed for delayed messages."
            )
        placed = self._publish(topic, batch, producer_id, epoch, sequence, expected_offset)
        return [one for one in placed if isinstance(one, Receipt)]

    def publish_delayed(
        self,
        topic: str,
        messages: Iterable[Outgoing],
        *,
        producer_id: str | None = None,
        epoch: int | None = None,
        sequence: int | None = None,
    ) -> list[Delayed]:
        batch = traced(messages)
        if not all(message.delayed for message in batch):
            raise InvalidArgument("the message has no delay", "Give delay or deliver_at, or publish it at once.")
        placed = self._publish(topic, batch, producer_id, epoch, sequence, None)
        return [one for one in placed if isinstance(one, Delayed)]

    def _publish(
        self,
        topic: str,
        batch: list[Outgoing],
        producer_id: str | None,
        epoch: int | None,
        sequence: int | None,
        expected_offset: int | None,
    ) -> list[Receipt | Delayed]:
        identity = producer_identity(producer_id, epoch, sequence)
        if not batch:
            self._layout_of(topic)  # refuses a topic that does not exist
            return []
        self._require_offset(topic_path(topic), expected_offset, OffsetConflict)
        body = PublishIn(
            topic=require_topic(topic),
            messages=[outgoing(message) for message in batch],
            expected_offset=None if expected_offset is None else min(expected_offset, LARGEST),
        )

        def send(producer_id: str, epoch: int, sequence: int, tries: Tries) -> list[Receipt | Delayed]:
            named = msgspec.structs.replace(body, producer_id=producer_id, epoch=epoch, sequence=sequence)
            answer = self._call("POST", "/messages", ReceiptsOut, body=named, repeat=True, tries=tries)
            return [one.value() for one in answer.receipts]

        if identity is None:
            return [_first(one) for one in self._own.publish(len(batch), send)]
        tries = Tries()
        try:
            return send(*identity, tries)
        except CustodyError as error:
            if tries.unknown:
                raise unknown_publish(error) from error
            raise

    def hint(self, topics: Iterable[str]) -> None:
        """Does nothing: the server sends wake-ups itself."""

    @special(Custody.read)
    def read(self, verb: Verb, given: dict[str, Any]) -> list[Message]:
        """Reads as many pages as needed."""
        offset, time, most = given["offset"], given["time"], given["max_messages"]
        if time is not None and offset is not None:
            raise InvalidArgument("read takes an offset or a time, not both", "Leave one of them out.")
        offset = prepared(self, verb, given)["offset"]
        path = f"{topic_path(given['topic'])}/partitions/{given['partition']}/messages"
        found: list[Message] = []
        while True:
            size = min(MOST, most - len(found))
            query = verb.query(offset=offset, time=time, max_messages=size)
            page = self._call("GET", path, list[msgspec.Raw], query=query)
            found += [msgspec.json.decode(message, type=MessageOut).value() for message in page]
            ended = len(page) < size and sum(map(len, page)) < MAY_BE_CUT
            if not page or ended or len(found) >= most:
                return found
            offset, time = found[-1].offset + 1, None


def _first(placed: Receipt | Delayed) -> Receipt | Delayed:
    """The receipt without `duplicate`: the client itself repeated the publish, so for the caller it is the first."""
    if not placed.duplicate:
        return placed
    if isinstance(placed, Receipt):
        return Receipt(placed.topic, placed.partition, placed.offset)
    return Delayed(
        topic=placed.topic, partition=placed.partition, delay_id=placed.delay_id, deliver_at=placed.deliver_at
    )
