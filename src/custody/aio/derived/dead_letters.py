"""`DeadLetters` of engine/dead_letters.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from typing import Annotated, Unpack

from custody.aio.base import Base
from custody.bridge import run
from custody.engine.dead_letters import DeadConditions, DeadFilter
from custody.model.entities import DeadLetter, Replayed
from custody.wire.fields import DryRun, Help, Name, Offset, Page, Partition, Reason


class DeadLetters(Base):
    """The dead messages of groups."""

    async def dead(
        self, topic: str, group: str, *, limit: Page = 1000, **which: Unpack[DeadConditions]
    ) -> list[DeadLetter]:
        """The dead letters of a group with their errors: all, or those that match the filters.

        They are ordered by partition and offset. Over HTTP at most 100,000; the list ends with the one that reaches
        16 MB of payload.
        """
        return await run(lambda: self._of.dead(topic, group, limit=limit, **which))

    async def redrive(
        self, topic: str, group: str, *, dry_run: DryRun = False, reason: Reason = None, **which: Unpack[DeadFilter]
    ) -> list[tuple[int, int]]:
        """Makes dead messages ready again, with attempts reset: all, or those that match the filters.

        Returns the (partition, offset) of each. With `dry_run` nothing changes.
        """
        return await run(lambda: self._of.redrive(topic, group, dry_run=dry_run, reason=reason, **which))

    async def discard(
        self, topic: str, group: str, *, dry_run: DryRun = False, reason: Reason = None, **which: Unpack[DeadFilter]
    ) -> list[tuple[int, int]]:
        """Resolves dead messages without processing them: all, or those that match the filters. This cannot be undone.

        Returns the (partition, offset) of each. With `dry_run` nothing changes.
        """
        return await run(lambda: self._of.discard(topic, group, dry_run=dry_run, reason=reason, **which))

    async def replay(
        self,
        dlq_topic: Annotated[Name, Help("The dead-letter topic, such as orders-dlq.")],
        partition: Annotated[Partition, Help("The partition of the copy.")],
        offset: Annotated[Offset, Help("The offset of the copy.")],
        *,
        target_topic: Annotated[Name | None, Help("The topic, instead of the original one.", "TOPIC")] = None,
        reason: Reason = None,
    ) -> Replayed:
        """Publishes the original of a dead-letter copy again, and marks the dead message as done. Idempotent.

        It goes to its topic or to another one. A repeat publishes nothing and returns the first receipt as a duplicate.
        """
        return await run(
            lambda: self._of.replay(dlq_topic, partition, offset, target_topic=target_topic, reason=reason)
        )
