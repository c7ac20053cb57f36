"""Verbs for operators: rewind, blocked keys, figures, history."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated

from custody import bridge
from custody.engine.base import Base
from custody.engine.groups import GROUP
from custody.errors import Busy, NotSkippable
from custody.model.entities import BlockedKey, HistoryEntry, PartitionStats, Rewound, Stats
from custody.model.insights import Bin, HandlingTime, LeaseStatus, OffsetMap, OldTransaction, Server
from custody.store import notify
from custody.wire.answers import CountOut, InFlightOut, RewindOut
from custody.wire.fields import DryRun, Help, Name, Offset, Page, Partition, Reason
from custody.wire.reports import HandlingOut
from custody.wire.verb import verb

PATIENCE = 5.0
"""Seconds for which a rewind is retried while somebody holds a lock on a lease that it revokes."""


class Operating(Base):
    """Inspecting and repairing groups."""

    @verb(
        "POST",
        GROUP + "/rewind",
        tag="groups",
        right="admin",
        answer=RewindOut,
        repeat="dry_run",
        example={"to_offset": 0},
    )
    def rewind(
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
        until, pause = time.monotonic() + PATIENCE, 0.05
        while True:
            try:
                rows = self._rows(
                    "rewind",
                    topic=topic,
                    group=group,
                    to_offset=to_offset,
                    to_time=to_time,
                    partition=partition,
                    dry_run=dry_run,
                    reason=reason,
                )
            except Busy:  # each try gives up early, so that claims can run between them
                if time.monotonic() + pause > until:
                    raise
                bridge.pause(pause)
                pause = min(2 * pause, 0.5)
            else:
                return [Rewound(**row) for row in rows]

    @verb("GET", GROUP + "/blocked", tag="groups", right="consume", answer=list[BlockedKey], operation="blocked")
    def blocked_keys(self, topic: str, group: str, *, limit: Page = 1000) -> list[BlockedKey]:
        """Blocked keys, the message that blocks each, and how many messages wait behind it."""
        self._db.call("lifecycle_group", topic=topic, group=group)
        rows = self._db.select(
            "blocked_keys", order=["partition", "since", "key"], limit=limit, topic=topic, consumer_group=group
        )
        known = ("topic", "consumer_group")
        return [BlockedKey(**{name: value for name, value in row.items() if name not in known}) for row in rows]

    @verb("POST", GROUP + "/blocked/release", tag="groups", right="admin", answer=CountOut, example={"key": "SKU-123"})
    def release_key(self, topic: str, group: str, key: str, *, reason: Reason = None) -> int:
        """Unblocks a key that is held by dead messages. They stay dead.

        Returns how many there were.
        """
        return int(self._value("release_key", topic=topic, group=group, key=key, reason=reason))

    @verb("POST", GROUP + "/retry", tag="groups", right="admin", answer=CountOut, example={"where_error": "timeout%"})
    def retry_now(
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
        return int(self._value("retry_now", topic=topic, group=group, key=key, where_error=where_error, reason=reason))

    @verb(
        "POST",
        GROUP + "/blocked/skip",
        tag="groups",
        right="admin",
        answer=None,
        nowhere=NotSkippable,
        example={"partition": 0, "offset": 42},
        operation="skip_blocked",
    )
    def skip(self, topic: str, group: str, partition: Partition, offset: Offset, *, reason: Reason = None) -> None:
        """Marks one waiting or dead message as done."""
        self._rows("skip", topic=topic, group=group, partition=partition, offset=offset, reason=reason)

    @verb("GET", GROUP + "/stats", tag="groups", right="consume", answer=Stats)
    def stats(self, topic: str, group: str) -> Stats:
        """The figures of a group, in total and for each partition."""
        row = self._rows("group_named", topic=topic, group=group)[0]
        partitions = tuple(PartitionStats(**row) for row in self._rows("partition_stats", topic=topic, group=group))
        return Stats(
            topic=topic,
            group=group,
            lag=sum(p.lag for p in partitions),
            waiting=sum(p.waiting for p in partitions),
            in_flight=sum(p.in_flight for p in partitions),
            holes=sum(p.holes for p in partitions),
            parked=sum(p.parked for p in partitions),
            dead=sum(p.dead for p in partitions),
            depth=sum(p.depth for p in partitions),
            oldest_unresolved=min((p.oldest_unresolved_at for p in partitions if p.oldest_unresolved_at), default=None),
            tail=tuple(p.tail for p in partitions),
            partitions=partitions,
            paused_at=row["paused_at"],
            paused_reason=row["paused_reason"],
            breaker=None if row["breaker_rate"] is None and row["breaker_state"] == "closed" else row["breaker_state"],
            breaker_reason=row["breaker_reason"],
            bound=row["bindings"] is not None,
        )

    @verb("GET", GROUP + "/map", tag="groups", right="consume", answer=list[OffsetMap])
    def offset_map(
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
        rows = self._rows(
            "offset_map",
            topic=topic,
            group=group,
            partition=partition,
            from_offset=from_offset,
            until_offset=until_offset,
        )
        return [
            OffsetMap(
                **{name: row[name] for name in ("partition", "first_offset", "until_offset", "frontier", "width")},
                bins=tuple(
                    Bin(
                        first_offset=row["first_offset"] + bin * row["width"],
                        **{name: row[name][number] for name in ("in_flight", "waiting", "parked", "dead")},
                    )
                    for number, bin in enumerate(row["bins"] or ())
                ),
            )
            for row in rows
        ]

    @verb("GET", GROUP + "/leases", tag="groups", right="consume", answer=list[LeaseStatus])
    def leases(self, topic: str, group: str, *, limit: Page = 1000) -> list[LeaseStatus]:
        """The live leases of a group: worker, messages and deadline, the next deadline first."""
        self._db.call("lifecycle_group", topic=topic, group=group)
        rows = self._db.select(
            "in_flight", order=["deadline", "partition", "lease_id"], limit=limit, topic=topic, consumer_group=group
        )
        names = ("lease_id", "partition", "worker", "messages", "attempt", "claimed_at", "deadline")
        return [LeaseStatus(**{name: row[name] for name in names}) for row in rows]

    @verb(
        "GET",
        "/topics/{topic}/partitions/{partition}/messages/{offset}/history",
        tag="operating",
        right="consume",
        answer=list[HistoryEntry],
        nowhere=[],
    )
    def trace(
        self,
        topic: str,
        partition: Partition,
        offset: Offset,
        *,
        group: Annotated[Name | None, Help("Only this group.")] = None,
    ) -> list[HistoryEntry]:
        """Everything that happened to one message, oldest first."""
        self._db.call("topic_named", topic=topic)
        rows = self._rows("trace", topic=topic, partition=partition, offset=offset, group=group)
        return [
            HistoryEntry(
                group=row["consumer_group"],
                **{name: row[name] for name in ("at", "kind", "attempt", "worker", "error", "traceback", "lease_id")},
            )
            for row in rows
        ]

    @verb("GET", "/topics/{topic}/inflight", tag="topics", right="consume", answer=InFlightOut)
    def in_flight(
        self, topic: str, group: Annotated[Name | None, Help("Only this group.")] = None
    ) -> dict[int, tuple[int, float | None]]:
        """For each partition: how many messages are leased, and the age of the oldest lease in seconds."""
        rows = self._rows("in_flight_figures", topic=topic, group=group)
        return {row["partition"]: (row["messages"], row["oldest_age"]) for row in rows}

    @verb("GET", "/handling-times", tag="operating", right="consume", answer=list[HandlingOut])
    def handling_times(
        self,
        topic: Annotated[Name | None, Help("Only of this topic.")] = None,
        group: Annotated[Name | None, Help("Only of groups of this name.")] = None,
    ) -> list[HandlingTime]:
        """How long recent leases took, for each group. A visibility timeout has to cover that."""
        rows = self._rows("handling_times", topic=topic, group=group)
        return [
            HandlingTime(
                group=row.pop("consumer_group"), visibility_timeout=row.pop("visibility_timeout").total_seconds(), **row
            )
            for row in rows
        ]

    @verb("GET", "/server", tag="operating", right="admin", everywhere=True, answer=Server)
    def server(self) -> Server:
        """The database server: its version, settings that durability depends on, long-running transactions, and the
        kind of connection."""
        db = self._db
        return Server(
            **self._rows("server_facts")[0],
            old_transactions=tuple(OldTransaction(**row) for row in self._rows("old_transactions")),
            pooled=db.pooled,
            listens=not db.pooled if self._listen_url == db.url else notify.can_listen(db, self._listen_url),
            default_isolation=db.isolation_default,
        )
