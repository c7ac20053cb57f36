"""The log: publish now or with a delay, and read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Annotated, Any, TypeVar, overload

from msgspec import Meta

from custody.coalesced import Publish
from custody.engine.sharing import SharedCommits
from custody.engine.topics import TOPIC, Topics
from custody.errors import DelayNotFound, InvalidArgument
from custody.model.codec import encode_event
from custody.model.entities import Delayed, Message, Outgoing, Payload, Receipt, Waiting, batch_of
from custody.model.lanes import Priority
from custody.model.limits import NAME_LENGTH
from custody.model.placement import PLACED_WRONGLY
from custody.model.policy import Duration
from custody.store import packed
from custody.tracing import traced
from custody.verbs import delays, log
from custody.verbs.producer import producer_identity
from custody.wire.answers import CountOut
from custody.wire.fields import Batch, Help, Offset, Page, Partition, Text
from custody.wire.messages import DelayedOut, MessageOut
from custody.wire.requests import GivenEvents
from custody.wire.verb import composed, verb

Placed = TypeVar("Placed", Receipt, Delayed)


class Publishing(Topics):
    """Publishing and reading messages."""

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

    @composed
    def publish(
        self,
        topic: str,
        payload: Payload,
        *,
        expected_offset: int | None = None,
        **rest: Any,
    ) -> Receipt | Delayed:
        """Appends one message; it is durable when this returns. With `expected_offset`, refused unless the message
        gets this offset.

        With `delay` or `deliver_at` the message is stored outside of the log until then, and can be cancelled by its
        `delay_id`. If both key and partition are given, the partition must be the key's own (`key_split`), unless
        `allow_split` gives up the key's order.
        """
        message = Outgoing(payload, **rest)
        if not message.delayed and expected_offset is None and self._shared is not None:
            return self._publish_shared(self._shared, topic, message)
        if not message.delayed:
            return self.publish_many(topic, [message], expected_offset=expected_offset)[0]
        if expected_offset is not None:
            raise InvalidArgument(
                "a delayed message has no offset yet: expected_offset cannot be checked", "Leave expected_offset out."
            )
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
        """Appends the messages in one transaction: all or none, in this order within each partition.

        With `producer_id`, `epoch` and `sequence` (of the first message) it is idempotent: a repeat returns the first
        receipts.
        """
        batch = traced(batch_of(messages))
        if any(message.delayed for message in batch):
            raise InvalidArgument(
                "a delayed message has no offset to return", "Use publish_delayed for delayed messages."
            )
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
        self._hints.send(topic)  # it may be due before the time for which waiting consumers have set their timers
        return receipts

    @verb("GET", TOPIC + "/delayed", tag="messages", right="consume", answer=list[DelayedOut])
    def delayed(
        self, topic: str, *, key: Annotated[str | None, Help("Only messages of this key.")] = None, limit: Page = 100
    ) -> list[Waiting]:
        """Delayed messages that are not due yet, the next one first.

        Over HTTP at most 100,000; the list ends with the one that reaches 16 MB of payload.
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
        """Cancels a delayed message; refused (`delay_not_found`) once it was delivered."""
        self._rows("cancel_delayed", topic=topic, delay_id=delay_id)

    def _publish_shared(self, shared: SharedCommits, topic: str, message: Outgoing) -> Receipt:
        (message,) = traced([message])
        (receipt,) = shared.publishes.submit(
            Publish(messages=[(topic, message)]), lambda: [*self.publish_many(topic, [message])]
        )
        assert isinstance(receipt, Receipt)
        return receipt

    def _placed(self, topic: str, publish: Callable[..., list[Placed]]) -> list[Placed]:
        try:
            return publish(layout=self._layout_of(topic))
        except PLACED_WRONGLY:  # the cached layout of the topic may be out of date
            self._forget(topic)
            return publish(layout=self._layout_of(topic))

    def hint(self, topics: Iterable[str]) -> None:
        """Wakes consumers that wait for messages of these topics, after a publish that Custody did not see: for example
        a commit of yours with events in the outbox. Without it they find the messages by polling."""
        for topic in topics:
            self._hints.send(topic)

    @verb(
        "POST",
        TOPIC + "/events",
        tag="messages",
        right="produce",
        answer=CountOut,
        repeat=True,  # the count of a repeat has only the events that the first attempt did not publish
        example={"events": [{"event_id": "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e", "payload": {"order": 17}}]},
    )
    def receive_events(
        self, topic: str, events: GivenEvents, *, source: Annotated[Text, Meta(max_length=NAME_LENGTH)] = ""
    ) -> int:
        """Publishes events of another database's outbox in one transaction, each once for its id and number of replays.

        Ids are compared within the topic and the `source`, over HTTP within the API key too. Returns how many were new.
        """
        encoded = [encode_event(*event) for event in events]
        new: int = self._value(
            "outbox_receive",
            topic=topic,
            events=[event_id for event_id, _, _ in events],
            replays=[replays for _, replays, _ in events],
            **packed.columns(encoded),
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
        offset: Annotated[Offset | None, Help("The first offset to read; by default the first of the log.")] = None,
        time: Annotated[datetime | None, Help("Read messages published at or after this time.")] = None,
        max_messages: Batch = 100,
    ) -> list[Message]:
        """Reads messages of the log from an offset or a time on, by default from the first. No group is involved."""
        if time is not None:
            if offset is not None:
                raise InvalidArgument("read takes an offset or a time, not both", "Leave one of them out.")
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
