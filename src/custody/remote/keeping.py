"""What is kept, over HTTP."""

from __future__ import annotations

from custody.engine.keeping import Keeping
from custody.model import Journal, Kept, Segment, Topic, Upkeep
from custody.policy import Duration
from custody.remote.base import RemoteBase, topic_path
from custody.retention import Retention, Size, keep_time, size_in_bytes
from custody.wire import fields
from custody.wire.reports import JournalOut, TopicOut
from custody.wire.requests import JournalPatch, MaintainIn, RetentionIn, TopicPatch


class RemoteKeeping(RemoteBase, Keeping):
    """How much of the log and of the journal is kept."""

    def set_retention(self, topic: str, retention: Retention | None) -> Topic:
        body = TopicPatch(retention=None if retention is None else RetentionIn.of(retention))
        return self._call("PATCH", topic_path(topic), TopicOut, body=body, repeat=True).value()

    def set_journal_retention(self, *, time: Duration | None = None, size: Size | None = None) -> None:
        body = JournalPatch(
            time=fields.Timeout.of(keep_time("time", time)),
            size=None if size is None else fields.Size(size_in_bytes(size)),
        )
        self._call("PATCH", "/journal", type(None), body=body, repeat=True)

    def maintain(self, topic: str | None = None) -> list[Upkeep]:
        """As the direct connection. The server does it by itself now and then."""
        return self._call("POST", "/maintain", list[Upkeep], body=MaintainIn(topic=topic))

    def segments(self, topic: str) -> list[Segment]:
        return self._call("GET", topic_path(topic) + "/segments", list[Segment])

    def kept_aside(self, topic: str) -> Kept:
        return self._call("GET", topic_path(topic) + "/kept", Kept)

    def journal(self) -> Journal:
        return self._call("GET", "/journal", JournalOut).value()

    def grow_topic(self, topic: str, *, partitions: int) -> Topic:
        grown = self._call("PATCH", topic_path(topic), TopicOut, body=TopicPatch(partitions=partitions)).value()
        self._layouts.pop(topic, None)
        return grown
