"""What an operator asks and does: dead letters, redrive, rewind, blocked keys, figures, history."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Literal, TypedDict, Unpack

from custody.codec import KINDS
from custody.engine.base import Base
from custody.engine.grouping import GROUP
from custody.errors import Busy, InvalidArgument, NotSkippable
from custody.insights import GroupFigures, HandlingTime, OldTransaction, Server, TopicFigures
from custody.lanes import priority_of
from custody.model import BlockedKey, DeadLetter, HistoryEntry, PartitionStats, Replayed, Rewound, Stats
from custody.outbox.events import Figures as OutboxFigures
from custody.policy import Duration, seconds
from custody.store import notify
from custody.wire.answers import CountOut, InFlightOut, RedrivenOut, RewindOut
from custody.wire.fields import Help, Name, Offset, Page, Partition, Positive, Reason
from custody.wire.messages import DeadOut
from custody.wire.reports import HandlingOut
from custody.wire.verb import verb

PATIENCE = 5.0
"""For so many seconds a rewind is tried while somebody has a lease locked that it takes something from."""


class DeadFilter(TypedDict, total=False):
    """Which dead messages: all conditions that are given must hold."""

    where_error: Annotated[str | None, Help("A LIKE pattern of their last error.")]
    key: str | None
    partition: Partition | None
    offsets: Annotated[Sequence[Offset] | None, Help("In this partition, which has to be given too.")]
    died_from: datetime | None
    died_until: datetime | None
    limit: Positive | None


class Operating(Base):
    """Looking at groups, and repairing them."""

    @verb("GET", GROUP + "/dead", tag="groups", right="consume", answer=list[DeadOut])
    def dead(self, topic: str, group: str, *, limit: Page = 1000) -> list[DeadLetter]:
        """The dead letters of a group, with payload and errors, the first of each partition first.

        Over HTTP no more than 100,000; the last is the one that reaches 16 MB of payload.
        """
        self._db.call("lifecycle_group", topic=topic, group=group)
        if self._max_bytes is not None:
            limit = self._value("dead_within", topic=topic, group=group, limit=limit, bytes=self._max_bytes)
        of = self._rows("topic_named", topic=topic)[0]
        rows = self._db.select(
            "dead_letters", order=["partition", "offset"], limit=limit, topic=topic, consumer_group=group
        )
        return [
            DeadLetter(
                topic=topic,
                partition=row["partition"],
                offset=row["offset"],
                key=row["key"],
                payload=self._decoding(KINDS[row["payload_kind"]], row["payload_bytes"]),
                headers=row["headers"] or {},
                attempt=row["attempts"],
                published_at=row["published_at"],
                priority=priority_of(row["partition"]) if of["starvation_limit"] is not None else None,
                topic_uid=of["uid"],
                attempts=row["attempts"],
                reason=row["reason"],
                last_error=row["last_error"],
                errors=tuple(row["errors"]),
                died_at=row["died_at"],
                held=row["held"],
            )
            for row in rows
        ]

    @verb(
        "POST",
        GROUP + "/redrive",
        tag="groups",
        right="admin",
        answer=RedrivenOut,
        repeat="dry_run",
        example={"where_error": "timeout%", "dry_run": True},
    )
    def redrive(
        self, topic: str, group: str, *, dry_run: bool = False, reason: Reason = None, **which: Unpack[DeadFilter]
    ) -> list[tuple[int, int]]:
        """Dead messages become ready, with a fresh budget: all, or those that fulfil every condition that is given.

        Returns (partition, offset) of each; with `dry_run` nothing changes.
        """
        return self._settle_dead("redrive", topic, group, dry_run, reason, which)

    @verb(
        "POST",
        GROUP + "/discard",
        tag="groups",
        right="admin",
        answer=RedrivenOut,
        repeat="dry_run",
        example={"key": "SKU-123", "reason": "the order was cancelled"},
    )
    def discard(
        self, topic: str, group: str, *, dry_run: bool = False, reason: Reason = None, **which: Unpack[DeadFilter]
    ) -> list[tuple[int, int]]:
        """Dead messages are given up for good, with the same conditions as `redrive`."""
        return self._settle_dead("discard", topic, group, dry_run, reason, which)

    def _settle_dead(
        self,
        function: Literal["redrive", "discard"],
        topic: str,
        group: str,
        dry_run: bool,
        reason: str | None,
        which: DeadFilter,
    ) -> list[tuple[int, int]]:
        limit, offsets = which.get("limit"), which.get("offsets")
        if limit is not None and limit < 1:
            raise InvalidArgument("limit must be at least 1")
        if offsets is not None and which.get("partition") is None:
            raise InvalidArgument("offsets need a partition", "Offsets repeat in each partition: say which one.")
        chosen = {**which, "offsets": None if offsets is None else list(offsets)}
        rows = self._rows(
            function,
            topic=topic,
            group=group,
            filter=tuple(chosen.get(name) for name in DeadFilter.__annotations__),  # in the order of the SQL type
            dry_run=dry_run,
            reason=reason,
        )
        return [(row["partition"], row["offset"]) for row in rows]

    @verb(
        "POST",
        "/messages/dlq/replay",
        tag="operating",
        right="admin",
        answer=Replayed,
        repeat=True,
        thing="/topics/{dlq_topic}",
        example={"dlq_topic": "orders-dlq", "partition": 0, "offset": 5, "target_topic": "orders"},
    )
    def replay(
        self,
        dlq_topic: Name,
        partition: Partition,
        offset: Offset,
        *,
        target_topic: Name | None = None,
        reason: Reason = None,
    ) -> Replayed:
        """Publishes a dead letter of `<topic>-dlq` again as the message that it was, to its topic or another one.

        The dead message counts as done. A repeat publishes nothing and returns the first receipt, as a duplicate.
        """
        return self._replay(dlq_topic, partition, offset, target_topic, reason, origin=None)

    def _replay(
        self, dlq_topic: str, partition: int, offset: int, target: str | None, reason: str | None, *, origin: str | None
    ) -> Replayed:
        """`origin`: only if the copy names this topic as its own."""
        row = self._rows(
            "replay_dead_letter",
            dlq_topic=dlq_topic,
            partition=partition,
            offset=offset,
            target=target,
            reason=reason,
            origin=origin,
        )[0]
        self._hints.send(row["topic"])
        return Replayed(**row)

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
        to_offset: Offset | None = None,
        to_time: datetime | None = None,
        partition: Partition | None = None,
        dry_run: bool = False,
        reason: Reason = None,
    ) -> list[Rewound]:
        """Everything from an offset or a time on is delivered again, on one partition or on all; leases over it are
        revoked."""
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
            except Busy:  # each try gives up soon, so that claims go on between them
                if time.monotonic() + pause > until:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
            else:
                return [Rewound(**row) for row in rows]

    @verb("GET", GROUP + "/blocked", tag="groups", right="consume", answer=list[BlockedKey], operation="blocked")
    def blocked_keys(self, topic: str, group: str, *, limit: Page = 1000) -> list[BlockedKey]:
        """Keys that cannot go on, what each waits for, and how much waits behind it."""
        self._db.call("lifecycle_group", topic=topic, group=group)
        rows = self._db.select(
            "blocked_keys", order=["partition", "since", "key"], limit=limit, topic=topic, consumer_group=group
        )
        known = ("topic", "consumer_group")
        return [BlockedKey(**{name: value for name, value in row.items() if name not in known}) for row in rows]

    @verb("POST", GROUP + "/blocked/release", tag="groups", right="admin", answer=CountOut, example={"key": "SKU-123"})
    def release_key(self, topic: str, group: str, key: str, *, reason: Reason = None) -> int:
        """Lets a key go on past its held dead messages, which stay dead. Returns how many there were."""
        return int(self._value("release_key", topic=topic, group=group, key=key, reason=reason))

    @verb(
        "POST",
        GROUP + "/blocked/skip",
        tag="groups",
        right="admin",
        answer=None,
        nowhere=NotSkippable,
        example={"partition": 0, "offset": 42},
    )
    def skip(self, topic: str, group: str, partition: Partition, offset: Offset, *, reason: Reason = None) -> None:
        """Counts one waiting or dead message as done."""
        self._rows("skip", topic=topic, group=group, partition=partition, offset=offset, reason=reason)

    @verb("GET", GROUP + "/stats", tag="groups", right="consume", answer=Stats)
    def stats(self, topic: str, group: str) -> Stats:
        """The figures of a group, in all and for each partition."""
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

    def overview(
        self, *, timeout: Duration = "5s"
    ) -> tuple[list[TopicFigures], list[GroupFigures], list[OutboxFigures]]:
        """The figures of all topics, all groups and the outbox, at a cost that does not grow with the log."""
        most = str(round(seconds(timeout) * 1000))
        try:
            return self._overview(most)
        except Busy:  # perhaps a segment that it looked into was dropped at that moment
            return self._overview(most)

    def _overview(self, most: str) -> tuple[list[TopicFigures], list[GroupFigures], list[OutboxFigures]]:
        """A statement that takes longer than so many milliseconds is given up (`busy`)."""
        with self._db.transaction() as connection:
            connection.execute("SELECT set_config('statement_timeout', %s, true)", [most])
            topics = [TopicFigures(**row) for row in self._rows("topic_figures", on=connection)]
            groups = [
                GroupFigures(group=row.pop("consumer_group"), **row)
                for row in self._rows("group_figures", on=connection)
            ]
            return topics, groups, [OutboxFigures(**row) for row in self._rows("outbox_stats", on=connection)]

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
        group: Annotated[Name | None, Help("Only of this group.")] = None,
    ) -> list[HistoryEntry]:
        """Everything that happened to one message, oldest first."""
        self._db.call("topic_named", topic=topic)
        rows = self._rows("trace", topic=topic, partition=partition, offset=offset, group=group)
        return [
            HistoryEntry(
                group=row["consumer_group"],
                **{name: row[name] for name in ("at", "kind", "attempt", "worker", "error", "lease_id")},
            )
            for row in rows
        ]

    @verb("GET", "/topics/{topic}/inflight", tag="topics", right="consume", answer=InFlightOut)
    def in_flight(
        self, topic: str, group: Annotated[Name | None, Help("Only of this group.")] = None
    ) -> dict[int, tuple[int, float | None]]:
        """For each partition how many messages are leased, and since how many seconds the oldest of them."""
        rows = self._rows("in_flight_figures", topic=topic, group=group)
        return {row["partition"]: (row["messages"], row["oldest_age"]) for row in rows}

    @verb("GET", "/handling-times", tag="operating", right="consume", answer=list[HandlingOut])
    def handling_times(
        self,
        topic: Annotated[Name | None, Help("Only of this topic.")] = None,
        group: Annotated[Name | None, Help("Only of groups of this name.")] = None,
    ) -> list[HandlingTime]:
        """How long recent leases took, for each group: what a visibility timeout has to cover."""
        rows = self._rows("handling_times", topic=topic, group=group)
        return [
            HandlingTime(
                group=row.pop("consumer_group"), visibility_timeout=row.pop("visibility_timeout").total_seconds(), **row
            )
            for row in rows
        ]

    @verb("GET", "/server", tag="operating", right="admin", everywhere=True, answer=Server)
    def server(self) -> Server:
        """The database server: its version, the settings that durability rests on, transactions that are open for long,
        and how it is connected to."""
        db = self._db
        return Server(
            **self._rows("server_facts")[0],
            old_transactions=tuple(OldTransaction(**row) for row in self._rows("old_transactions")),
            pooled=db.pooled,
            listens=not db.pooled if self._listen_url == db.url else notify.hears(db, self._listen_url),
            default_isolation=db.isolation_default,
        )
