"""`IdempotentProducer` of verbs/producer.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from custody.aio.live import LiveProducer
from custody.bridge import run
from custody.model.entities import Delayed, Outgoing, Payload, Receipt


class IdempotentProducer(LiveProducer):
    """Publishes under one producer id and epoch, and counts the sequence itself.

    After a publish with unknown outcome (the connection was lost), publish the same again, or call `repeat`: messages
    that had arrived come back with `duplicate=True`, the others are published. Publishing something else repeats it
    first.
    """

    @property
    def next_sequence(self) -> int:
        return self._of.next_sequence

    async def publish(self, topic: str, payload: Payload, **rest: Any) -> Receipt:
        """Publishes one message. Takes the arguments of `Outgoing`: key, headers, partition, routing_key."""
        return await run(lambda: self._of.publish(topic, payload, **rest))

    async def publish_many(self, topic: str, messages: Iterable[Outgoing | Payload]) -> list[Receipt]:
        return await run(lambda: self._of.publish_many(topic, messages))

    async def publish_delayed(self, topic: str, messages: Iterable[Outgoing]) -> list[Delayed]:
        """Publishes messages with a `delay` or `deliver_at`; a repeat returns their first ids."""
        return await run(lambda: self._of.publish_delayed(topic, messages))

    async def repeat(self) -> list[Any]:
        """Repeats the publish with unknown outcome; does nothing if there is none."""
        return await run(lambda: self._of.repeat())
