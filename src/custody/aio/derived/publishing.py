"""`Publishing` of engine/publishing.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, Any, overload

from msgspec import Meta

from custody.aio.derived.topics import Topics
from custody.bridge import run
from custody.model.entities import Delayed, Message, Outgoing, Payload, Receipt, Waiting
from custody.model.lanes import Priority
from custody.model.limits import NAME_LENGTH
from custody.model.policy import Duration
from custody.wire.fields import Batch, Help, Offset, Page, Partition, Text
from custody.wire.requests import GivenEvents


class Publishing(Topics):
    """Publishing and reading messages."""

    @overload
    async def publish(
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
    async def publish(
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

    async def publish(
        self, topic: str, payload: Payload, *, expected_offset: int | None = None, **rest: Any
    ) -> Receipt | Delayed:
        """Appends one message; it is durable when this returns. With `expected_offset`, refused unless the message
        gets this offset.

        With `delay` or `deliver_at` the message is stored outside of the log until then, and can be cancelled by its
        `delay_id`. If both key and partition are given, the partition must be the key's own (`key_split`), unless
        `allow_split` gives up the key's order.
        """
        return await run(lambda: self._of.publish(topic, payload, expected_offset=expected_offset, **rest))

    async def publish_many(
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
        return await run(
            lambda: self._of.publish_many(
                topic,
                messages,
                expected_offset=expected_offset,
                producer_id=producer_id,
                epoch=epoch,
                sequence=sequence,
            )
        )

    async def publish_delayed(
        self,
        topic: str,
        messages: Iterable[Outgoing],
        *,
        producer_id: str | None = None,
        epoch: int | None = None,
        sequence: int | None = None,
    ) -> list[Delayed]:
        """Stores messages that have a `delay` or `deliver_at`, in one transaction; idempotent as `publish_many`."""
        return await run(
            lambda: self._of.publish_delayed(topic, messages, producer_id=producer_id, epoch=epoch, sequence=sequence)
        )

    async def delayed(
        self, topic: str, *, key: Annotated[str | None, Help("Only messages of this key.")] = None, limit: Page = 100
    ) -> list[Waiting]:
        """Delayed messages that are not due yet, the next one first.

        Over HTTP at most 100,000; the list ends with the one that reaches 16 MB of payload.
        """
        return await run(lambda: self._of.delayed(topic, key=key, limit=limit))

    async def delayed_count(self, topic: str) -> int:
        """How many delayed messages are not due yet."""
        return await run(lambda: self._of.delayed_count(topic))

    async def cancel_delayed(self, topic: str, delay_id: Offset) -> None:
        """Cancels a delayed message; refused (`delay_not_found`) once it was delivered."""
        return await run(lambda: self._of.cancel_delayed(topic, delay_id))

    def hint(self, topics: Iterable[str]) -> None:
        """Wakes consumers that wait for messages of these topics, after a publish that Custody did not see: for example
        a commit of yours with events in the outbox. Without it they find the messages by polling."""
        return self._of.hint(topics)

    async def receive_events(
        self, topic: str, events: GivenEvents, *, source: Annotated[Text, Meta(max_length=NAME_LENGTH)] = ""
    ) -> int:
        """Publishes events of another database's outbox in one transaction, each once for its id and number of replays.

        Ids are compared within the topic and the `source`, over HTTP within the API key too. Returns how many were new.
        """
        return await run(lambda: self._of.receive_events(topic, events, source=source))

    async def read(
        self,
        topic: str,
        partition: Partition = 0,
        *,
        offset: Annotated[Offset | None, Help("The first offset to read; by default the first of the log.")] = None,
        time: Annotated[datetime | None, Help("Read messages published at or after this time.")] = None,
        max_messages: Batch = 100,
    ) -> list[Message]:
        """Reads messages of the log from an offset or a time on, by default from the first. No group is involved."""
        return await run(lambda: self._of.read(topic, partition, offset=offset, time=time, max_messages=max_messages))
