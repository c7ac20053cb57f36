"""`Operating` of engine/operating.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from custody.aio.base import Base
from custody.bridge import run
from custody.model.entities import BlockedKey, HistoryEntry, Rewound, Stats
from custody.model.insights import HandlingTime, LeaseStatus, OffsetMap
from custody.wire.fields import DryRun, Help, Name, Offset, Page, Partition, Reason


class Operating(Base):
    """Inspecting and repairing groups."""

    async def rewind(
        self,
        topic: str,
        group: str,
        *,
        to_offset: Annotated[Offset | None, Help("First offset to deliver again.")] = None,
        to_time: Annotated[datetime | None, Help("Deliver again what was published at this time or later.")] = None,
        partition: Annotated[Partition | None, Help("Only this partition.")] = None,
        dry_run: DryRun = False,
        reason: Reason = None,
    ) -> list[Rewound]:
        """Delivers all messages from an offset or a time on again. Leases of those messages are revoked."""
        return await run(
            lambda: self._of.rewind(
                topic, group, to_offset=to_offset, to_time=to_time, partition=partition, dry_run=dry_run, reason=reason
            )
        )

    async def blocked_keys(self, topic: str, group: str, *, limit: Page = 1000) -> list[BlockedKey]:
        """Blocked keys, the message that blocks each, and how many messages wait behind it."""
        return await run(lambda: self._of.blocked_keys(topic, group, limit=limit))

    async def release_key(self, topic: str, group: str, key: str, *, reason: Reason = None) -> int:
        """Unblocks a key that is held by dead messages. They stay dead.

        Returns how many there were.
        """
        return await run(lambda: self._of.release_key(topic, group, key, reason=reason))

    async def retry_now(
        self,
        topic: str,
        group: str,
        *,
        key: Annotated[str | None, Help("Only messages of this key.")] = None,
        where_error: Annotated[str | None, Help("Only errors that match, such as 'timeout%'.", "LIKE")] = None,
        reason: Reason = None,
    ) -> int:
        """Makes messages that wait for a retry due now: all, or those that match the filters.

        Returns their number.
        """
        return await run(lambda: self._of.retry_now(topic, group, key=key, where_error=where_error, reason=reason))

    async def skip(
        self, topic: str, group: str, partition: Partition, offset: Offset, *, reason: Reason = None
    ) -> None:
        """Marks one waiting or dead message as done."""
        return await run(lambda: self._of.skip(topic, group, partition, offset, reason=reason))

    async def stats(self, topic: str, group: str) -> Stats:
        """The figures of a group, in total and for each partition."""
        return await run(lambda: self._of.stats(topic, group))

    async def offset_map(
        self,
        topic: str,
        group: str,
        *,
        partition: Annotated[Partition | None, Help("Only this partition.")] = None,
        from_offset: Annotated[Offset | None, Help("Only messages from this offset on.")] = None,
        until_offset: Annotated[Offset | None, Help("Only messages before this offset.")] = None,
    ) -> list[OffsetMap]:
        """The state of messages by offset, for a picture: counted in at most 200 ranges of each partition.

        It costs as much as the exceptions of the group, however long the log is.
        """
        return await run(
            lambda: self._of.offset_map(
                topic, group, partition=partition, from_offset=from_offset, until_offset=until_offset
            )
        )

    async def leases(self, topic: str, group: str, *, limit: Page = 1000) -> list[LeaseStatus]:
        """The live leases of a group: worker, messages and deadline, the next deadline first."""
        return await run(lambda: self._of.leases(topic, group, limit=limit))

    async def trace(
        self,
        topic: str,
        partition: Partition,
        offset: Offset,
        *,
        group: Annotated[Name | None, Help("Only this group.")] = None,
    ) -> list[HistoryEntry]:
        """Everything that happened to one message, oldest first."""
        return await run(lambda: self._of.trace(topic, partition, offset, group=group))

    async def in_flight(
        self, topic: str, group: Annotated[Name | None, Help("Only this group.")] = None
    ) -> dict[int, tuple[int, float | None]]:
        """For each partition: how many messages are leased, and the age of the oldest lease in seconds."""
        return await run(lambda: self._of.in_flight(topic, group))

    async def handling_times(
        self,
        topic: Annotated[Name | None, Help("Only of this topic.")] = None,
        group: Annotated[Name | None, Help("Only of groups of this name.")] = None,
    ) -> list[HandlingTime]:
        """How long recent leases took, for each group. A visibility timeout has to cover that."""
        return await run(lambda: self._of.handling_times(topic, group))
