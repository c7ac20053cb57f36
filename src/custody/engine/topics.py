"""Topics: create, grow, delete and describe them; retention of topics and of the journal, and upkeep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import UNSET, UnsetType

from custody.engine.base import Base
from custody.errors import Busy, InvalidArgument
from custody.model.entities import Journal, JournalPart, Kept, Segment, Topic, Upkeep
from custody.model.policy import interval
from custody.model.retention import Retention, keep_time, size_in_bytes
from custody.store.postgres import Connection
from custody.verbs import upkeep
from custody.wire.fields import GivenSize, GivenTimeout, Help, Large, Name, NewName, Partitions
from custody.wire.policies import GivenRetention
from custody.wire.reports import JournalOut, TopicOut
from custody.wire.verb import composed, verb

TOPIC = "/topics/{topic}"


class Topics(Base):
    """Topics, and the retention of the log and of the journal."""

    @verb(
        "POST",
        "/topics",
        tag="topics",
        right="admin",
        on="name",
        answer=TopicOut,
        status=201,
        repeat=True,
        example={"name": "orders", "partitions": 4},
    )
    def create_topic(
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
        """Deletes a topic with its messages and groups. This cannot be undone."""
        self._rows("delete_topic", topic=name)
        self._layouts.pop(name, None)

    @verb("GET", "/topics", tag="topics", right="any", answer=list[TopicOut])
    def topics(self) -> list[Topic]:
        """All topics.

        Over HTTP those that the API key has a right to.
        """
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
        except Busy:  # a segment was sealed and dropped while it was read
            if tries == 1:
                raise
            return self._bounds(topic, tries - 1)

    @verb(
        "PATCH",
        TOPIC,
        tag="topics",
        right="admin",
        answer=TopicOut,
        repeat=True,
        example={"retention": {"time": "7d"}},
    )
    def change_topic(
        self,
        topic: str,
        *,
        partitions: Annotated[Partitions | UnsetType, Help("New number of partitions.")] = UNSET,
        retention: GivenRetention | UnsetType | None = UNSET,
    ) -> Topic:
        """Adds partitions, or sets the retention (None keeps everything), or both in one transaction.

        Partitions are refused while a group ordered by key has unresolved messages, because keys would move.
        """
        if partitions is UNSET and retention is UNSET:
            raise InvalidArgument("there is nothing to change", "Give partitions or retention.")
        with self._db.transaction() as connection:
            if partitions is not UNSET:
                self._rows("grow_topic", on=connection, topic=topic, partitions=partitions)
            if retention is not UNSET:
                self._keep(topic, retention, on=connection)
        if partitions is not UNSET:
            self._layouts.pop(topic, None)
            self._hints.send(topic)
        return self.topic(topic)

    @composed
    def grow_topic(self, topic: str, *, partitions: Annotated[Partitions, Help("New number of partitions.")]) -> Topic:
        """Adds partitions. Refused while a group ordered by key has unresolved messages, because keys would move."""
        return self.change_topic(topic, partitions=partitions)

    @composed
    def set_retention(self, topic: str, retention: GivenRetention | None) -> Topic:
        """Sets the retention of a topic; None keeps everything."""
        return self.change_topic(topic, retention=retention)

    def _keep(self, topic: str, retention: Retention | None, *, on: Connection) -> None:
        self._rows("set_retention", on=on, topic=topic, **({} if retention is None else retention.columns()))

    @verb("POST", "/maintain", tag="topics", right="admin", on="topic", answer=list[Upkeep], example={})
    def maintain(self, topic: Annotated[Name | None, Help("Only this topic (default: all).")] = None) -> list[Upkeep]:
        """Applies retention now, for one topic or for all: seals and drops segments that are due, drops parts of the
        journal, and removes the rest of transactions that timed out. Workers, pipelines and servers do it regularly.

        Each step is a transaction of its own and gives up at once if it would wait for a lock (`did` is busy). A
        segment with messages that a group has not resolved stays (held), and the group is named.
        """
        return upkeep.maintain(self._db, topic)

    @verb("GET", TOPIC + "/segments", tag="topics", right="consume", answer=list[Segment])
    def segments(self, topic: str) -> list[Segment]:
        """The segments of a topic, oldest first, and what prevents the drop of the oldest."""
        return [Segment(**row) for row in self._rows("describe_segments", topic=topic)]

    @verb("GET", TOPIC + "/kept", tag="topics", right="consume", answer=Kept)
    def kept_aside(self, topic: str) -> Kept:
        """Dead letters that are kept although their segments were dropped."""
        return Kept(**self._rows("kept_aside", topic=topic)[0])

    @verb("GET", "/journal", tag="topics", right="admin", everywhere=True, answer=JournalOut)
    def journal(self) -> Journal:
        """The retention of the journal, and its parts."""
        kept = self._db.select("journal_settings", order=["one"])[0]
        return Journal(
            keep_time=kept["retention_time"],
            keep_size=kept["retention_bytes"],
            dropped_until=kept["dropped_until"],
            parts=tuple(JournalPart(**row) for row in self._rows("describe_journal")),
        )

    @verb(
        "PATCH",
        "/journal",
        tag="topics",
        right="admin",
        everywhere=True,
        answer=JournalOut,
        repeat=True,
        operation="change_journal",
        example={"time": "90d"},
    )
    def set_journal_retention(
        self,
        *,
        time: Annotated[GivenTimeout | None, Help("Keep the journal for this long, such as 30d.")] = None,
        size: Annotated[GivenSize | None, Help("Keep at most this much of it, such as 5GB.")] = None,
    ) -> Journal:
        """Sets how far back the journal, and with it `trace`, goes; without arguments everything is kept."""
        seconds = keep_time("time", time)
        self._rows(
            "set_journal_retention",
            time=None if seconds is None else f"{seconds} s",
            bytes=None if size is None else size_in_bytes(size),
        )
        return self.journal()
