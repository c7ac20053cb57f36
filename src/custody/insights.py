"""What can be known of a group: figures, dead letters, blocked keys, the history of a message. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from custody.codec import Decoding, decode
from custody.errors import Busy
from custody.lanes import priority_of
from custody.model import BlockedKey, DeadLetter, Group, HistoryEntry, PartitionStats, Stats
from custody.policy import Policy
from custody.routing import Binding
from custody.store import notify
from custody.store.postgres import Database

_KINDS = {"json": "j", "text": "t", "bytes": "b"}


def stats(db: Database, topic: str, group: str, *, now: datetime | None) -> Stats:
    row = db.call_dicts("group_named", topic=topic, group=group)[0]
    partitions = tuple(
        PartitionStats(**row) for row in db.call_dicts("partition_stats", topic=topic, group=group, now=now)
    )
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


def describe_group(topic: str, row: Mapping[str, Any]) -> Group:
    return Group(
        topic=topic,
        name=row["name"],
        bare=row["bare"],
        policy=None if row["bare"] else Policy.from_columns(row),
        paused_at=row["paused_at"],
        paused_reason=row["paused_reason"],
        created_at=row["created_at"],
        bindings=tuple(Binding(one.get("pattern"), headers=one.get("headers")) for one in row["bindings"] or ()),
    )


def groups(db: Database, topic: str) -> list[Group]:
    topic_id = db.call_dicts("topic_named", topic=topic)[0]["topic_id"]
    return [describe_group(topic, row) for row in db.select("groups", order=["name"], topic_id=topic_id)]


def dead(
    db: Database, topic: str, group: str, *, limit: int, max_bytes: int | None = None, decoding: Decoding = decode
) -> list[DeadLetter]:
    """Dead letters with payload and errors, the first of each partition first; the last is the one that reaches
    `max_bytes`."""
    db.call("lifecycle_group", topic=topic, group=group)
    if max_bytes is not None:
        limit = db.call("dead_within", topic=topic, group=group, limit=limit, bytes=max_bytes)[0][0]
    of = db.call_dicts("topic_named", topic=topic)[0]
    rows = db.select("dead_letters", order=["partition", "offset"], limit=limit, topic=topic, consumer_group=group)
    return [
        DeadLetter(
            topic=topic,
            partition=row["partition"],
            offset=row["offset"],
            key=row["key"],
            payload=decoding(_KINDS[row["payload_kind"]], row["payload_bytes"]),
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


def blocked_keys(db: Database, topic: str, group: str, *, limit: int) -> list[BlockedKey]:
    db.call("lifecycle_group", topic=topic, group=group)
    rows = db.select(
        "blocked_keys", order=["partition", "since", "key"], limit=limit, topic=topic, consumer_group=group
    )
    return [
        BlockedKey(**{name: value for name, value in row.items() if name not in ("topic", "consumer_group")})
        for row in rows
    ]


def trace(db: Database, topic: str, partition: int, offset: int, *, group: str | None) -> list[HistoryEntry]:
    """Everything that happened to one message, oldest first."""
    db.call("topic_named", topic=topic)
    rows = db.call_dicts("trace", topic=topic, partition=partition, offset=offset, group=group)
    return [
        HistoryEntry(
            at=row["at"],
            group=row["consumer_group"],
            kind=row["kind"],
            attempt=row["attempt"],
            worker=row["worker"],
            error=row["error"],
            lease_id=row["lease_id"],
        )
        for row in rows
    ]


@dataclass(frozen=True, kw_only=True)
class OldTransaction:
    """A transaction open for more than a minute: `kind` is idle in transaction, running or prepared."""

    kind: str
    who: str
    pid: int | None
    since: datetime


@dataclass(frozen=True, kw_only=True)
class Server:
    """The database server as `custody doctor` sees it."""

    version_num: int
    version: str
    schema_version: int
    fsync: bool
    full_page_writes: bool
    synchronous_commit: str
    old_transactions: tuple[OldTransaction, ...]
    pooled: bool
    """A connection pooler is in between."""
    listens: bool
    """Whether notifications of it are heard: behind a pooler only with a listen_url."""
    default_isolation: str
    """What it gives a transaction that names no level."""


@dataclass(frozen=True, kw_only=True)
class HandlingTime:
    """How long the last leases of a group took from claim to settle, in seconds, and how many expired in the last hour.

    `expired_alive`: leases that expired although their worker went on. Those were too short.
    """

    topic: str
    group: str
    visibility_timeout: float
    leases: int
    p50: float | None
    p99: float | None
    slowest: float | None
    expired: int
    expired_alive: int

    @property
    def recommended(self) -> float | None:
        """The visibility timeout that these times suggest: three times the p99, and no less than 30 s."""
        return None if self.p99 is None else max(30.0, 3 * self.p99)


def server(db: Database, listen_url: str) -> Server:
    old = tuple(OldTransaction(**row) for row in db.call_dicts("old_transactions"))
    return Server(
        **db.call_dicts("server_facts")[0],
        old_transactions=old,
        pooled=db.pooled,
        listens=not db.pooled if listen_url == db.url else notify.hears(db, listen_url),
        default_isolation=db.isolation_default,
    )


def handling_times(db: Database, topic: str | None, group: str | None, *, now: datetime | None) -> list[HandlingTime]:
    rows = db.call_dicts("handling_times", topic=topic, group=group, now=now)
    return [
        HandlingTime(
            topic=row["topic"],
            group=row["consumer_group"],
            visibility_timeout=row["visibility_timeout"].total_seconds(),
            leases=row["leases"],
            p50=row["p50"],
            p99=row["p99"],
            slowest=row["slowest"],
            expired=row["expired"],
            expired_alive=row["expired_alive"],
        )
        for row in rows
    ]


@dataclass(frozen=True, kw_only=True)
class TopicFigures:
    """`messages` are in the log; `appended` were ever, those that retention has dropped too."""

    topic: str
    partitions: int
    messages: int
    appended: int


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """The figures of `Stats` over all partitions, with the age of the oldest unresolved message in seconds. Where the
    group is bound, lag and depth include what it has not looked at yet, bound to it or not."""

    topic: str
    group: str
    lag: int
    waiting: int
    in_flight: int
    holes: int
    parked: int
    dead: int
    depth: int
    oldest_unresolved_age: float | None
    paused: bool
    breaker: str | None
    bound: bool


Rows = list[dict[str, Any]]


def figures(
    db: Database, *, timeout: float, now: datetime | None
) -> tuple[list[TopicFigures], list[GroupFigures], Rows]:
    """All topics, all groups, and the rows of `outbox_stats`. A statement that takes longer than `timeout` seconds is
    given up (`busy`)."""
    try:
        return _figures(db, timeout, now)
    except Busy:  # perhaps a segment that it looked into was dropped at that moment
        return _figures(db, timeout, now)


def _figures(db: Database, timeout: float, now: datetime | None) -> tuple[list[TopicFigures], list[GroupFigures], Rows]:
    with db.transaction() as connection:
        connection.execute("SELECT set_config('statement_timeout', %s, true)", [str(round(timeout * 1000))])
        topics = [TopicFigures(**row) for row in db.call_dicts("topic_figures", on=connection)]
        groups = []
        for row in db.call_dicts("group_figures", on=connection, now=now):
            groups.append(GroupFigures(group=row.pop("consumer_group"), **row))
        return topics, groups, db.call_dicts("outbox_stats", on=connection, now=now)
