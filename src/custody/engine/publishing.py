"""The log: topics, publishing now or later, reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeVar, overload
from uuid import UUID

from custody import delays, log, topics
from custody.codec import arrays, encode_event
from custody.engine.base import Base
from custody.errors import InvalidArgument
from custody.lanes import Priority
from custody.model import Delayed, Message, Outgoing, Payload, Receipt, Topic, Waiting, batch_of
from custody.placement import PLACED_WRONGLY
from custody.policy import Duration
from custody.producer import producer_identity
from custody.retention import Retention
from custody.tracing import traced

Placed = TypeVar("Placed", Receipt, Delayed)


class Publishing(Base):
    """Topics and what is in them."""

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        max_depth: int | None = None,
        priorities: bool = False,
        starvation_limit: Duration | None = None,
        retention: Retention | None = None,
    ) -> Topic:
        """A new topic. `max_depth` caps what the slowest group has not resolved, for each partition.

        With `priorities` each partition is five in the log, one for each priority: claims take from them by weight, and
        first what has waited for longer than `starvation_limit` (a minute, if none is given).
        """
        topics.create(
            self._db,
            name,
            partitions=partitions,
            max_depth=max_depth,
            priorities=priorities,
            starvation_limit=starvation_limit,
            retention=retention,
            now=self._now(),
        )
        self._layouts.pop(name, None)
        return self.topic(name)

    def delete_topic(self, name: str) -> None:
        """Removes a topic with its messages and groups, for good."""
        topics.delete(self._db, name)
        self._layouts.pop(name, None)

    def topics(self) -> list[Topic]:
        return topics.every(self._db)

    def topic(self, name: str) -> Topic:
        return topics.named(self._db, name)

    @overload
    def publish(
        self,
        topic: str,
        payload: Payload,
        *,
        key: str | None = ...,
        headers: Mapping[str, str] | None = ...,
        partition: int | None = ...,
        priority: Priority | None = ...,
        routing_key: str | None = ...,
        allow_split: bool = ...,
        expected_offset: int | None = ...,
    ) -> Receipt: ...

    @overload
    def publish(
        self,
        topic: str,
        payload: Payload,
        *,
        key: str | None = ...,
        headers: Mapping[str, str] | None = ...,
        partition: int | None = ...,
        priority: Priority | None = ...,
        routing_key: str | None = ...,
        allow_split: bool = ...,
        delay: Duration | None = ...,
        deliver_at: datetime | None = ...,
    ) -> Delayed: ...

    def publish(
        self,
        topic: str,
        payload: Payload,
        *,
        expected_offset: int | None = None,
        **rest: Any,
    ) -> Receipt | Delayed:
        """Appends one message; it is durable when this returns. `expected_offset` refuses if the partition moved on.

        With `delay` or `deliver_at` it waits beside the log until then; it can be cancelled by its `delay_id`. A
        partition beside a key has to be the key's own (`key_split`), unless `allow_split` gives up the key's order.
        """
        message = Outgoing(payload, **rest)
        if not message.delayed:
            return self.publish_many(topic, [message], expected_offset=expected_offset)[0]
        if expected_offset is not None:
            raise InvalidArgument("a delayed message has no offset yet: expected_offset cannot be checked")
        return self.publish_delayed(topic, [message])[0]

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
        """Appends the messages in one transaction: all of them or none, in this order for each partition.

        With `producer_id`, `epoch` and `sequence` (of the first message) a repeat returns the first receipts.
        """
        batch = traced(batch_of(messages))
        if any(message.delayed for message in batch):
            raise InvalidArgument("a delayed message has no offset to return", "Use publish_delayed for those.")
        identity = producer_identity(producer_id, epoch, sequence)
        receipts = self._placed(
            topic, partial(log.publish, self._db, topic, batch, producer=identity, expected_offset=expected_offset)
        )
        self._hints.send(topic)
        return receipts

    def publish_delayed(
        self,
        topic: str,
        messages: Iterable[Outgoing],
        *,
        producer_id: str | None = None,
        epoch: int | None = None,
        sequence: int | None = None,
    ) -> list[Delayed]:
        """Stores messages that have a `delay` or `deliver_at`, in one transaction; idempotent as `publish_many`."""
        identity = producer_identity(producer_id, epoch, sequence)
        batch = traced(messages)
        receipts = self._placed(topic, partial(delays.publish, self._db, topic, batch, producer=identity))
        self._hints.send(topic)  # whoever waits may have to wake up earlier now
        return receipts

    def delayed(self, topic: str, *, key: str | None = None, limit: int = 100) -> list[Waiting]:
        """Delayed messages that are not due yet, the next one first."""
        return delays.waiting(self._db, topic, key=key, limit=limit, max_bytes=self._max_bytes, decoding=self._decoding)

    def delayed_count(self, topic: str) -> int:
        return int(self._db.call("delayed_count", topic=topic)[0][0])

    def cancel_delayed(self, topic: str, delay_id: int) -> None:
        """Takes back a delayed message that is still waiting; refused (`delay_not_found`) once it was delivered."""
        self._db.call("cancel_delayed", topic=topic, delay_id=delay_id)

    def _placed(self, topic: str, publish: Callable[..., list[Placed]]) -> list[Placed]:
        try:
            return publish(layout=self._layout_of(topic), now=self._now())
        except PLACED_WRONGLY:  # the topic may have changed since we last looked
            self._forget(topic)
            return publish(layout=self._layout_of(topic), now=self._now())

    def _forget(self, topic: str) -> None:
        self._layouts.pop(topic, None)

    def hint(self, topics: Iterable[str]) -> None:
        """Wakes those who wait for messages of these topics, after something was published in another way: by a commit
        of yours with events for the outbox, for example. They would find it by polling, too."""
        for topic in topics:
            self._hints.send(topic)

    def receive_events(self, topic: str, events: Sequence[tuple[UUID, int, Outgoing]], *, source: str = "") -> int:
        """Publishes events of an outbox elsewhere, in one transaction: each once for its id and number of replays.

        Ids are compared within the topic and the `source`. Returns how many were new.
        """
        encoded = [encode_event(*event) for event in events]
        new: int = self._db.call(
            "outbox_receive",
            topic=topic,
            events=[event_id for event_id, _, _ in events],
            replays=[replays for _, replays, _ in events],
            **arrays(encoded),
            source=source,
            now=self._now(),
        )[0][0]
        if new:
            self.hint([topic])
        return new

    def read(
        self,
        topic: str,
        partition: int = 0,
        *,
        offset: int | None = None,
        time: datetime | None = None,
        max_messages: int = 100,
    ) -> list[Message]:
        """Messages as they are in the log, from an offset or a time on (else from the first); no group is involved."""
        if time is not None:
            if offset is not None:
                raise InvalidArgument("read takes an offset or a time, not both")
            offset = log.offset_at(self._db, topic, partition, time)
        return log.read(
            self._db,
            topic,
            partition,
            offset=offset,
            max_messages=max_messages,
            max_bytes=self._max_bytes,
            decoding=self._decoding,
        )
