"""What is kept, over HTTP."""

from __future__ import annotations

from custody.engine.keeping import Keeping
from custody.model import Journal, Kept, Segment, Topic, Upkeep
from custody.plain import plain
from custody.policy import Duration
from custody.remote.base import RemoteBase, topic_path
from custody.remote.values import TopicIn
from custody.retention import Retention, Size, keep_time, size_in_bytes


class RemoteKeeping(RemoteBase, Keeping):
    """How much of the log and of the journal is kept."""

    def set_retention(self, topic: str, retention: Retention | None) -> Topic:
        body = {"retention": None if retention is None else plain(retention)}
        return self._call("PATCH", topic_path(topic), TopicIn, body=body, repeat=True).value()

    def set_journal_retention(self, *, time: Duration | None = None, size: Size | None = None) -> None:
        body = {"time": keep_time("time", time), "size": None if size is None else size_in_bytes(size)}
        self._call("PATCH", "/journal", type(None), body=body, repeat=True)

    def maintain(self, topic: str | None = None) -> list[Upkeep]:
        """As the direct connection. The server does it by itself now and then."""
        return self._call("POST", "/maintain", list[Upkeep], body={"topic": topic})

    def segments(self, topic: str) -> list[Segment]:
        return self._call("GET", topic_path(topic) + "/segments", list[Segment])

    def kept_aside(self, topic: str) -> Kept:
        return self._call("GET", topic_path(topic) + "/kept", Kept)

    def journal(self) -> Journal:
        return self._call("GET", "/journal", Journal)

    def grow_topic(self, topic: str, *, partitions: int) -> Topic:
        grown = self._call("PATCH", topic_path(topic), TopicIn, body={"partitions": partitions}).value()
        self._layouts.pop(topic, None)
        return grown
