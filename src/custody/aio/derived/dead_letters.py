"""`DeadLetters` of engine/dead_letters.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from typing import Unpack

from custody.aio.base import Base
from custody.bridge import run
from custody.engine.dead_letters import DeadConditions, DeadFilter
from custody.model.entities import DeadLetter, Replayed
from custody.wire.fields import Name, Offset, Page, Partition, Reason


class DeadLetters(Base):
    """The dead messages of groups."""

    async def dead(
        self, topic: str, group: str, *, limit: Page = 1000, **which: Unpack[DeadConditions]
    ) -> list[DeadLetter]:
        """The dead letters of a group with payload and errors, by partition and offset.

        Those that meet every condition. Over HTTP at most 100,000; the list ends with the one that reaches 16 MB of
        payload.
        """
        return await run(lambda: self._of.dead(topic, group, limit=limit, **which))

    async def redrive(
        self, topic: str, group: str, *, dry_run: bool = False, reason: Reason = None, **which: Unpack[DeadFilter]
    ) -> list[tuple[int, int]]:
        """Makes dead messages ready again, with a fresh budget of attempts: all, or those that meet every condition.

        Returns the (partition, offset) of each. With `dry_run` nothing changes.
        """
        return await run(lambda: self._of.redrive(topic, group, dry_run=dry_run, reason=reason, **which))

    async def discard(
        self, topic: str, group: str, *, dry_run: bool = False, reason: Reason = None, **which: Unpack[DeadFilter]
    ) -> list[tuple[int, int]]:
        """Gives up dead messages for good. The conditions are those of `redrive`."""
        return await run(lambda: self._of.discard(topic, group, dry_run=dry_run, reason=reason, **which))

    async def replay(
        self,
        dlq_topic: Name,
        partition: Partition,
        offset: Offset,
        *,
        target_topic: Name | None = None,
        reason: Reason = None,
    ) -> Replayed:
        """Publishes a dead letter of `<topic>-dlq` as its original message, to its topic or to another one.

        The dead message then counts as done. A repeat publishes nothing and returns the first receipt as a duplicate.
        """
        return await run(
            lambda: self._of.replay(dlq_topic, partition, offset, target_topic=target_topic, reason=reason)
        )
