"""The log: publishing now or later, reading."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Annotated, Any, TypeVar, overload
from uuid import UUID

from custody.engine.topics import TOPIC, Topics
from custody.errors import DelayNotFound, InvalidArgument
from custody.model.codec import arrays, encode_event
from custody.model.entities import Delayed, Message, Outgoing, Payload, Receipt, Waiting, batch_of
from custody.model.lanes import Priority
from custody.model.placement import PLACED_WRONGLY
from custody.model.policy import Duration
from custody.tracing import traced
from custody.verbs import delays, log
from custody.verbs.producer import producer_identity
from custody.wire.answers import CountOut
from custody.wire.fields import Batch, Help, Offset, Page, Partition
from custody.wire.messages import DelayedOut, MessageOut
from custody.wire.verb import verb

Placed = TypeVar("Placed", Receipt, Delayed)


class Publishing(Topics):
    """What is in topics."""

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

    @verb("GET", TOPIC + "/delayed", tag="messages", right="consume", answer=list[DelayedOut])
    def delayed(
        self, topic: str, *, key: Annotated[str | None, Help("Only those of this key.")] = None, limit: Page = 100
    ) -> list[Waiting]:
        """Delayed messages that are not due yet, the next one first.

        Over HTTP no more than 100,000; the last is the one that reaches 16 MB of payload.
        """
        rows = self._rows("delayed_messages", topic=topic, key=key, limit=limit, bytes=self._max_bytes)
        return [
            Waiting(
                topic=topic,
                partition=row["partition"],
                delay_id=row["delay_id"],
                deliver_at=row["deliver_at"],
                key=row["key"],
                payload=self._decoding(row["kind"], row["payload"]),
                headers=row["headers"] or {},
                delayed_at=row["delayed_at"],
            )
            for row in rows
        ]

    @verb("GET", TOPIC + "/delayed/count", tag="messages", right="consume", answer=CountOut)
    def delayed_count(self, topic: str) -> int:
        """How many delayed messages are not due yet."""
        return int(self._value("delayed_count", topic=topic))

    @verb(
        "DELETE",
        TOPIC + "/delayed/{delay_id}",
        tag="messages",
        right="produce",
        answer=None,
        nowhere=DelayNotFound,
    )
    def cancel_delayed(self, topic: str, delay_id: Offset) -> None:
        """Takes back a delayed message that is still waiting; refused (`delay_not_found`) once it was delivered."""
        self._rows("cancel_delayed", topic=topic, delay_id=delay_id)

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
        new: int = self._value(
            "outbox_receive",
            topic=topic,
            events=[event_id for event_id, _, _ in events],
            replays=[replays for _, replays, _ in events],
            **arrays(encoded),
            source=source,
        )
        if new:
            self.hint([topic])
        return new

    @verb(
        "GET",
        TOPIC + "/partitions/{partition}/messages",
        tag="messages",
        right="consume",
        answer=list[MessageOut],
        names={"max_messages": "max"},
    )
    def read(
        self,
        topic: str,
        partition: Partition = 0,
        *,
        offset: Annotated[Offset | None, Help("From this offset on; without it and a time, the first.")] = None,
        time: Annotated[datetime | None, Help("From what was published at this time on.")] = None,
        max_messages: Batch = 100,
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
