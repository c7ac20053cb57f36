"""`Topics` of engine/topics.py for asyncio. Made by scripts/async_surface.py: do not edit."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, UnsetType

from custody.aio.base import Base
from custody.bridge import run
from custody.model.entities import Journal, Kept, Segment, Topic, Upkeep
from custody.wire.fields import GivenSize, GivenTimeout, Help, Large, Name, NewName, Partitions
from custody.wire.policies import GivenRetention


class Topics(Base):
    """Topics, and the retention of the log and of the journal."""

    async def create_topic(
        self,
        name: NewName,
        *,
        partitions: Annotated[Partitions, Help("Number of partitions.")] = 1,
        max_depth: Annotated[
            Large | None, Help("Refuse publishes while a partition has this many unresolved messages.")
        ] = None,
        priorities: Annotated[
            bool, Help("Five priorities, served by weight. The log has a partition for each.")
        ] = False,
        starvation_limit: Annotated[
            GivenTimeout | None, Help("With priorities: messages that wait longer come first (default: 1m).")
        ] = None,
        retention: GivenRetention | None = None,
    ) -> Topic:
        """Creates a topic.

        `max_depth` limits how many messages the slowest group may have unresolved in a partition.

        With `priorities` each partition has five lanes in the log, one for each priority. Claims take from them by
        weight, but first what has waited for longer than `starvation_limit` (default: a minute).
        """
        return await run(
            lambda: self._of.create_topic(
                name,
                partitions=partitions,
                max_depth=max_depth,
                priorities=priorities,
                starvation_limit=starvation_limit,
                retention=retention,
            )
        )

    async def delete_topic(self, name: str) -> None:
        """Deletes a topic with its messages and groups. This cannot be undone."""
        return await run(lambda: self._of.delete_topic(name))

    async def topics(self) -> list[Topic]:
        """All topics.

        Over HTTP those that the API key has a right to.
        """
        return await run(lambda: self._of.topics())

    async def topic(self, name: str) -> Topic:
        """One topic, with its offsets and the number of messages."""
        return await run(lambda: self._of.topic(name))

    async def change_topic(
        self,
        topic: str,
        *,
        partitions: Annotated[Partitions | UnsetType, Help("New number of partitions.")] = UNSET,
        retention: GivenRetention | UnsetType | None = UNSET,
    ) -> Topic:
        """Adds partitions, or sets the retention (None keeps everything), or both in one transaction.

        Partitions are refused while a group ordered by key has unresolved messages, because keys would move.
        """
        return await run(lambda: self._of.change_topic(topic, partitions=partitions, retention=retention))

    async def grow_topic(
        self, topic: str, *, partitions: Annotated[Partitions, Help("New number of partitions.")]
    ) -> Topic:
        """Adds partitions. Refused while a group ordered by key has unresolved messages, because keys would move."""
        return await run(lambda: self._of.grow_topic(topic, partitions=partitions))

    async def set_retention(self, topic: str, retention: GivenRetention | None) -> Topic:
        """Sets the retention of a topic; None keeps everything."""
        return await run(lambda: self._of.set_retention(topic, retention))

    async def maintain(
        self, topic: Annotated[Name | None, Help("Only this topic (default: all).")] = None
    ) -> list[Upkeep]:
        """Applies retention now, for one topic or for all: seals and drops segments that are due, drops parts of the
        journal, and removes the rest of transactions that timed out. Workers, pipelines and servers do it regularly.

        Each step is a transaction of its own and gives up at once if it would wait for a lock (`did` is busy). A
        segment with messages that a group has not resolved stays (held), and the group is named.
        """
        return await run(lambda: self._of.maintain(topic))

    async def segments(self, topic: str) -> list[Segment]:
        """The segments of a topic, oldest first, and what prevents the drop of the oldest."""
        return await run(lambda: self._of.segments(topic))

    async def kept_aside(self, topic: str) -> Kept:
        """Dead letters that are kept although their segments were dropped."""
        return await run(lambda: self._of.kept_aside(topic))

    async def journal(self) -> Journal:
        """The retention of the journal, and its parts."""
        return await run(lambda: self._of.journal())

    async def set_journal_retention(
        self,
        *,
        time: Annotated[GivenTimeout | None, Help("Keep the journal for this long, such as 30d.")] = None,
        size: Annotated[GivenSize | None, Help("Keep at most this much of it, such as 5GB.")] = None,
    ) -> Journal:
        """Sets how far back the journal, and with it `trace`, goes; without arguments everything is kept."""
        return await run(lambda: self._of.set_journal_retention(time=time, size=size))
