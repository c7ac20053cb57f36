"""What an operator asks and does, over HTTP. What changes something is sent once: its count cannot be had twice."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Any

from custody.engine.operating import Operating, dead_filter
from custody.errors import NotSkippable, OffsetOutOfRange, PartitionNotFound
from custody.insights import HandlingTime, Server
from custody.model import BlockedKey, DeadLetter, HistoryEntry, Replayed, Rewound, Stats
from custody.policy import require_zone
from custody.remote.base import RemoteBase, group_path, topic_path
from custody.remote.values import LARGEST, page_size, possible, require_partition
from custody.wire.answers import CountOut, InFlightOut, RedrivenOut, RewindOut
from custody.wire.messages import DeadOut
from custody.wire.queries import GroupQuery, LimitQuery, TopicGroupQuery
from custody.wire.requests import KeyIn, RedriveIn, ReplayIn, RewindIn, SkipIn


class RemoteOperating(RemoteBase, Operating):
    """Looking at groups, and repairing them."""

    def dead(self, topic: str, group: str, *, limit: int = 1000) -> list[DeadLetter]:
        """As the direct connection, and at most 100,000; the last is the one that reaches 16 MB of payload."""
        query = LimitQuery(limit=page_size(limit))
        found = self._call("GET", group_path(topic, group) + "/dead", list[DeadOut], query=query)
        return [one.value() for one in found[:limit]]

    def redrive(
        self, topic: str, group: str, *, dry_run: bool = False, reason: str | None = None, **which: Any
    ) -> list[tuple[int, int]]:
        return self._settle_dead("redrive", topic, group, dry_run, reason, which)

    def discard(
        self, topic: str, group: str, *, dry_run: bool = False, reason: str | None = None, **which: Any
    ) -> list[tuple[int, int]]:
        return self._settle_dead("discard", topic, group, dry_run, reason, which)

    def _settle_dead(
        self, verb: str, topic: str, group: str, dry_run: bool, reason: str | None, which: dict[str, Any]
    ) -> list[tuple[int, int]]:
        chosen = asdict(dead_filter(which))
        if chosen["offsets"] is not None:
            chosen["offsets"] = [offset for offset in chosen["offsets"] if possible(offset)]
        body = RedriveIn(**chosen, dry_run=dry_run, reason=reason)
        return self._call("POST", f"{group_path(topic, group)}/{verb}", RedrivenOut, body=body, repeat=dry_run).value()

    def replay(
        self,
        dlq_topic: str,
        partition: int,
        offset: int,
        *,
        target_topic: str | None = None,
        reason: str | None = None,
    ) -> Replayed:
        """As the direct connection. It is sent again after a lost answer, and then is a duplicate."""
        self._require_offset(topic_path(dlq_topic), offset)
        require_partition(partition)
        body = ReplayIn(
            dlq_topic=dlq_topic,
            partition=partition,
            offset=min(offset, LARGEST),
            target_topic=target_topic,
            reason=reason,
        )
        return self._call("POST", "/messages/dlq/replay", Replayed, body=body, repeat=True)

    def rewind(
        self,
        topic: str,
        group: str,
        *,
        to_offset: int | None = None,
        to_time: datetime | None = None,
        partition: int | None = None,
        dry_run: bool = False,
        reason: str | None = None,
    ) -> list[Rewound]:
        require_zone(to_time)
        path = group_path(topic, group)
        require_partition(partition)
        self._require_offset(path, to_offset)
        body = RewindIn(
            to_offset=None if to_offset is None else min(to_offset, LARGEST),
            to_time=to_time,
            partition=partition,
            dry_run=dry_run,
            reason=reason,
        )
        return self._call("POST", path + "/rewind", RewindOut, body=body, repeat=dry_run).value()

    def blocked_keys(self, topic: str, group: str, *, limit: int = 1000) -> list[BlockedKey]:
        """As the direct connection, and at most 100,000."""
        path = group_path(topic, group) + "/blocked"
        return self._call("GET", path, list[BlockedKey], query=LimitQuery(limit=page_size(limit)))[:limit]

    def release_key(self, topic: str, group: str, key: str, *, reason: str | None = None) -> int:
        path = group_path(topic, group) + "/blocked/release"
        return self._call("POST", path, CountOut, body=KeyIn(key=key, reason=reason)).count

    def skip(self, topic: str, group: str, partition: int, offset: int, *, reason: str | None = None) -> None:
        path = group_path(topic, group)
        require_partition(partition)
        self._require_offset(path, offset, NotSkippable)
        body = SkipIn(partition=partition, offset=min(offset, LARGEST), reason=reason)
        self._call("POST", path + "/blocked/skip", type(None), body=body)

    def stats(self, topic: str, group: str) -> Stats:
        return self._call("GET", group_path(topic, group) + "/stats", Stats)

    def trace(self, topic: str, partition: int, offset: int, *, group: str | None = None) -> list[HistoryEntry]:
        path = topic_path(topic)
        try:
            require_partition(partition)
            self._require_offset(path, offset)
        except (PartitionNotFound, OffsetOutOfRange):
            return []  # nothing has happened there
        path = f"{path}/partitions/{partition}/messages/{min(offset, LARGEST)}/history"
        return self._call("GET", path, list[HistoryEntry], query=GroupQuery(group=group))

    def in_flight(self, topic: str, group: str | None = None) -> dict[int, tuple[int, float | None]]:
        path = topic_path(topic) + "/inflight"
        return self._call("GET", path, InFlightOut, query=GroupQuery(group=group)).value()

    def handling_times(self, topic: str | None = None, group: str | None = None) -> list[HandlingTime]:
        query = TopicGroupQuery(topic=topic, group=group)
        return self._call("GET", "/handling-times", list[HandlingTime], query=query)

    def server(self) -> Server:
        return self._call("GET", "/server", Server)
