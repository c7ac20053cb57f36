"""What is kept: retention, its upkeep, segments, and how many partitions a topic has."""

from __future__ import annotations

from custody import topics, upkeep
from custody.engine.base import Base
from custody.model import Journal, Kept, Segment, Topic, Upkeep
from custody.policy import Duration
from custody.retention import Retention, Size


class Keeping(Base):
    """How much of the log and of the journal is kept."""

    def set_retention(self, topic: str, retention: Retention | None) -> Topic:
        """From now on the topic keeps that much; None: everything."""
        upkeep.set_retention(self._db, topic, retention)
        return topics.named(self._db, topic)

    def set_journal_retention(self, *, time: Duration | None = None, size: Size | None = None) -> None:
        """From now on the journal, and with it `trace`, goes back so far; without arguments, to the beginning."""
        upkeep.set_journal_retention(self._db, time=time, size=size)

    def maintain(self, topic: str | None = None) -> list[Upkeep]:
        """Ends and drops segments that are due, and parts of the journal, and removes what is left of producers'
        transactions that timed out. Workers and pipelines do it by themselves.

        Each step is a transaction of its own and gives up at once where somebody is in the way (`did` is busy). A
        segment that a group has not resolved stays (held), and the group is named.
        """
        return upkeep.maintain(self._db, topic, now=self._now)

    def segments(self, topic: str) -> list[Segment]:
        """The segments of a topic, oldest first, and what holds the oldest one."""
        return upkeep.segments(self._db, topic)

    def kept_aside(self, topic: str) -> Kept:
        """The events of dead letters that have outlived their segments."""
        return upkeep.kept(self._db, topic)

    def journal(self) -> Journal:
        """What the journal keeps, and its parts."""
        time, size, dropped = upkeep.journal_retention(self._db)
        return Journal(
            keep_time=time, keep_size=size, dropped_until=dropped, parts=tuple(upkeep.journal_parts(self._db))
        )

    def _change_topic(self, topic: str, *, partitions: int, retention: Retention | None) -> Topic:
        """Both at once, or nothing."""
        with self._db.transaction() as connection:
            topics.grow(self._db, topic, partitions=partitions, now=self._now(), on=connection)
            upkeep.set_retention(self._db, topic, retention, on=connection)
        self._layouts.pop(topic, None)
        self._hints.send(topic)
        return topics.named(self._db, topic)

    def grow_topic(self, topic: str, *, partitions: int) -> Topic:
        """More partitions. Refused while a group that is ordered by key has anything unresolved: keys would move."""
        topics.grow(self._db, topic, partitions=partitions, now=self._now())
        self._layouts.pop(topic, None)
        self._hints.send(topic)
        return topics.named(self._db, topic)
