"""The log over HTTP: publishing now or later, reading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from custody.engine import Custody
from custody.errors import CustodyError, InvalidArgument, OffsetConflict
from custody.model.entities import Delayed, Message, Outgoing, Payload, Receipt, batch_of
from custody.model.policy import Policy
from custody.remote.base import RemoteBase, require_topic, topic_path
from custody.remote.derived import prepared
from custody.remote.producers import OwnProducers, unknown_publish
from custody.remote.transport import Transport, Tries
from custody.remote.values import event, outgoing
from custody.tracing import traced
from custody.verbs.producer import producer_identity
from custody.wire.answers import CountOut, ProducerOut
from custody.wire.fields import LARGEST, MOST
from custody.wire.messages import MessageOut, ReceiptsOut
from custody.wire.requests import EventsIn, ProducerIn, PublishIn
from custody.wire.verb import declared

READ = declared(Custody)["read"]
MAY_BE_CUT = 2**20
"""Bytes of an answer: a server ends one early for its size too, at 16 MB. So much, and there may be more to read."""


class RemotePublishing(RemoteBase):
    """What is in topics. What is published is sent under a producer, and so arrives once."""

    def __init__(self, transport: Transport, *, defaults: Policy | None = None, worker: str | None = None) -> None:
        super().__init__(transport, defaults=defaults, worker=worker)
        self._own = OwnProducers(self._init_own, self._forget_own)

    def close(self) -> None:
        """Ends the connections, after the server was told to forget this client's producers."""
        self._own.close()
        super().close()

    def _init_own(self, producer_id: str) -> int:
        body = ProducerIn(producer_id=producer_id)
        return self._call("POST", "/producers/init", ProducerOut, body=body, repeat=True).epoch

    def _forget_own(self, producer_id: str, **patience: float) -> None:
        # sent again: nobody else has an id like this, and it is not used again
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
        """As the direct connection. One request: what is larger than the server takes is refused (`too_large`)."""
        batch = traced(batch_of(messages))
        if any(message.delayed for message in batch):
            raise InvalidArgument("a delayed message has no offset to return", "Use publish_delayed for those.")
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
            self._layout_of(topic)  # refuses a topic that is not there
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
        """Nothing: the server hints by itself."""

    def receive_events(self, topic: str, events: Sequence[tuple[UUID, int, Outgoing]], *, source: str = "") -> int:
        """Events of an outbox elsewhere. After a lost answer the count has only those that had not come before."""
        body = EventsIn(events=[event(*one) for one in events], source=source)
        return self._call("POST", topic_path(topic) + "/events", CountOut, body=body, repeat=True).count

    def read(
        self,
        topic: str,
        partition: int = 0,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        max_messages: int = 100,
    ) -> list[Message]:
        if time is not None and offset is not None:
            raise InvalidArgument("read takes an offset or a time, not both")
        given = {"topic": topic, "partition": partition, "offset": offset, "time": time, "max_messages": max_messages}
        offset = prepared(self, READ, given)["offset"]
        path = f"{topic_path(topic)}/partitions/{partition}/messages"
        found: list[Message] = []
        while True:
            size = min(MOST, max_messages - len(found))
            query = READ.query(offset=offset, time=time, max_messages=size)
            page = self._call("GET", path, list[msgspec.Raw], query=query)
            found += [msgspec.json.decode(message, type=MessageOut).value() for message in page]
            ended = len(page) < size and sum(map(len, page)) < MAY_BE_CUT
            if not page or ended or len(found) >= max_messages:
                return found
            offset, time = found[-1].offset + 1, None


def _first(placed: Receipt | Delayed) -> Receipt | Delayed:
    """A receipt of a publish that was sent twice without the caller's doing: to the caller it is the first one."""
    if not placed.duplicate:
        return placed
    if isinstance(placed, Receipt):
        return Receipt(placed.topic, placed.partition, placed.offset)
    return Delayed(
        topic=placed.topic, partition=placed.partition, delay_id=placed.delay_id, deliver_at=placed.deliver_at
    )
