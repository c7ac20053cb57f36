"""Topics: make, grow, delete and describe them; what they and the journal keep, and its upkeep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from custody.engine.base import Base
from custody.errors import Busy
from custody.model.entities import Journal, JournalPart, Kept, Segment, Topic, Upkeep
from custody.model.policy import Duration, interval
from custody.model.retention import Retention, Size, keep_time, size_in_bytes
from custody.store.postgres import Connection
from custody.verbs import upkeep
from custody.wire.fields import Name
from custody.wire.reports import JournalOut, TopicOut
from custody.wire.verb import verb

TOPIC = "/topics/{topic}"


class Topics(Base):
    """Topics, and how much of the log and of the journal is kept."""

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
        limit = interval(starvation_limit)
        with self._db.transaction() as connection:
            self._rows(
                "create_topic",
                on=connection,
                topic=name,
                partitions=partitions,
                max_depth=max_depth,
                priorities=priorities,
                starvation_limit=limit,
            )
            if retention is not None:
                self._keep(name, retention, on=connection)
        self._layouts.pop(name, None)
        return self.topic(name)

    @verb("DELETE", TOPIC, tag="topics", right="admin", answer=None, names={"name": "topic"})
    def delete_topic(self, name: str) -> None:
        """Removes a topic with its messages and groups, for good."""
        self._rows("delete_topic", topic=name)
        self._layouts.pop(name, None)

    @verb("GET", "/topics", tag="topics", right="any", answer=list[TopicOut])
    def topics(self) -> list[Topic]:
        """All topics; with a key, those that it has a right to."""
        return [self._topic(row) for row in self._db.select("topics", order=["name"])]

    @verb("GET", TOPIC, tag="topics", right="any", answer=TopicOut, names={"name": "topic"})
    def topic(self, name: str) -> Topic:
        """One topic, with its offsets and the number of messages."""
        return self._topic(self._rows("topic_named", topic=name)[0])

    def _topic(self, row: Mapping[str, Any]) -> Topic:
        bounds = self._bounds(row["name"])
        return Topic(
            name=row["name"],
            uid=row["uid"],
            partitions=row["partitions"],
            max_depth=row["max_depth"],
            created_at=row["created_at"],
            first_offsets=tuple(first for _, first, _ in bounds),
            tails=tuple(tail for _, _, tail in bounds),
            starvation_limit=row["starvation_limit"],
            retention=Retention.from_columns(row),
        )

    def _bounds(self, topic: str, tries: int = 4) -> list[tuple[Any, ...]]:
        try:
            return self._db.call("partitions", topic=topic)
        except Busy:  # the segment that it looked into was sealed and dropped at that moment
            if tries == 1:
                raise
            return self._bounds(topic, tries - 1)

    def grow_topic(self, topic: str, *, partitions: int) -> Topic:
        """More partitions. Refused while a group that is ordered by key has anything unresolved: keys would move."""
        self._rows("grow_topic", topic=topic, partitions=partitions)
        return self._grown(topic)

    def _grown(self, topic: str) -> Topic:
        self._layouts.pop(topic, None)
        self._hints.send(topic)
        return self.topic(topic)

    def set_retention(self, topic: str, retention: Retention | None) -> Topic:
        """From now on the topic keeps that much; None: everything."""
        self._keep(topic, retention)
        return self.topic(topic)

    def _keep(self, topic: str, retention: Retention | None, *, on: Connection | None = None) -> None:
        self._rows("set_retention", on=on, topic=topic, **({} if retention is None else retention.columns()))

    def _change_topic(self, topic: str, *, partitions: int, retention: Retention | None) -> Topic:
        """More partitions, and what is kept: both, or nothing."""
        with self._db.transaction() as connection:
            self._rows("grow_topic", on=connection, topic=topic, partitions=partitions)
            self._keep(topic, retention, on=connection)
        return self._grown(topic)

    @verb("POST", "/maintain", tag="topics", right="admin", answer=list[Upkeep], example={})
    def maintain(self, topic: Name | None = None) -> list[Upkeep]:
        """Ends and drops segments that are due, and parts of the journal, and removes what is left of producers'
        transactions that timed out: of one topic, or of all. Workers, pipelines and servers do it by themselves.

        Each step is a transaction of its own and gives up at once where somebody is in the way (`did` is busy). A
        segment that a group has not resolved stays (held), and the group is named.
        """
        return upkeep.maintain(self._db, topic, now=self._now)

    @verb("GET", TOPIC + "/segments", tag="topics", right="consume", answer=list[Segment])
    def segments(self, topic: str) -> list[Segment]:
        """The segments of a topic, oldest first, and what holds the oldest one."""
        return [Segment(**row) for row in self._rows("describe_segments", topic=topic)]

    @verb("GET", TOPIC + "/kept", tag="topics", right="consume", answer=Kept)
    def kept_aside(self, topic: str) -> Kept:
        """The events of dead letters that have outlived their segments."""
        return Kept(**self._rows("kept_aside", topic=topic)[0])

    @verb("GET", "/journal", tag="topics", right="admin", everywhere=True, answer=JournalOut)
    def journal(self) -> Journal:
        """What the journal keeps, and its parts."""
        kept = self._db.select("journal_settings", order=["one"])[0]
        return Journal(
            keep_time=kept["retention_time"],
            keep_size=kept["retention_bytes"],
            dropped_until=kept["dropped_until"],
            parts=tuple(JournalPart(**row) for row in self._rows("describe_journal")),
        )

    def set_journal_retention(self, *, time: Duration | None = None, size: Size | None = None) -> None:
        """From now on the journal, and with it `trace`, goes back so far; without arguments, to the beginning."""
        seconds = keep_time("time", time)
        self._rows(
            "set_journal_retention",
            time=None if seconds is None else f"{seconds} s",
            bytes=None if size is None else size_in_bytes(size),
        )
