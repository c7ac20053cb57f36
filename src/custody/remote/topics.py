"""Topics over HTTP, as far as they are written by hand: one that may have been made, and changes by PATCH."""

from __future__ import annotations

from custody.errors import TopicExists
from custody.model.entities import Topic
from custody.model.policy import Duration
from custody.model.retention import Retention, Size, keep_time, size_in_bytes
from custody.remote.base import RemoteBase, topic_path
from custody.remote.transport import Tries
from custody.remote.values import fits
from custody.wire import fields
from custody.wire.reports import TopicOut
from custody.wire.requests import JournalPatch, RetentionIn, TopicIn, TopicPatch


class RemoteTopics(RemoteBase):
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
        body = TopicIn(
            name=name,
            partitions=partitions,
            max_depth=max_depth,
            priorities=priorities,
            starvation_limit=fields.Timeout.of(starvation_limit),
            retention=None if retention is None else RetentionIn.of(retention),
        )
        tries = Tries()
        try:
            made = self._call("POST", "/topics", TopicOut, body=body, repeat=True, tries=tries).value()
        except TopicExists:
            if not tries.unknown:
                raise
            made = self.topic(name)  # an attempt of ours may have made it
            if not _as_asked(made, partitions, max_depth, priorities, retention):
                raise
        self._layouts.pop(name, None)
        return made

    def delete_topic(self, name: str) -> None:
        try:
            # not sent again after a lost answer: by then somebody may have made another topic of that name
            self._call("DELETE", topic_path(name), type(None))
        finally:
            self._layouts.pop(name, None)

    def set_retention(self, topic: str, retention: Retention | None) -> Topic:
        body = TopicPatch(retention=None if retention is None else RetentionIn.of(retention))
        return self._call("PATCH", topic_path(topic), TopicOut, body=body, repeat=True).value()

    def grow_topic(self, topic: str, *, partitions: int) -> Topic:
        grown = self._call("PATCH", topic_path(topic), TopicOut, body=TopicPatch(partitions=partitions)).value()
        self._layouts.pop(topic, None)
        return grown

    def set_journal_retention(self, *, time: Duration | None = None, size: Size | None = None) -> None:
        body = JournalPatch(
            time=fields.Timeout.of(keep_time("time", time)),
            size=None if size is None else fields.Size(size_in_bytes(size)),
        )
        self._call("PATCH", "/journal", type(None), body=body, repeat=True)


def _as_asked(
    made: Topic, partitions: int, max_depth: int | None, priorities: bool, retention: Retention | None
) -> bool:
    """Whether a topic is what was asked for. Of the starvation limit only that there is one: it has a default."""
    asked = partitions * 5 if priorities else partitions
    return (made.partitions, made.max_depth, made.priorities) == (asked, max_depth, priorities) and fits(
        made.retention, retention
    )
