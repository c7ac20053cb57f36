"""Figures of the database server, of all topics and groups, and of handling times."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID


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
    """Whether there is a connection pooler."""
    listens: bool
    """Whether its notifications arrive: behind a pooler only with a listen_url."""
    default_isolation: str
    """`default_transaction_isolation`."""


@dataclass(frozen=True, kw_only=True)
class HandlingTime:
    """How long the last leases of a group took from claim to settle, in seconds, and how many expired in the last hour.

    `expired_alive`: leases that expired while their worker was alive. Those were too short.
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
        """The recommended visibility timeout: three times the p99, at least 30 s."""
        return None if self.p99 is None else max(30.0, 3 * self.p99)


@dataclass(frozen=True, kw_only=True)
class Bin:
    """Messages of one range of offsets that are neither done nor waiting for their first delivery, by state."""

    first_offset: int
    in_flight: int
    waiting: int
    parked: int
    dead: int


@dataclass(frozen=True, kw_only=True)
class OffsetMap:
    """The state of the messages of a partition by offset, from `first_offset` to before `until_offset`.

    `bins` are ranges of `width` offsets. Every other message is done if it is below the `frontier`, and was never
    delivered if it is not.
    """

    partition: int
    first_offset: int
    until_offset: int
    frontier: int
    width: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True, kw_only=True)
class LeaseStatus:
    """A part of a live lease: who holds how many messages of a partition, since when and until when. A lease has a part
    for fresh messages and one for retries, whose messages have attempts of their own (`attempt` is null)."""

    lease_id: UUID
    partition: int
    worker: str | None
    messages: int
    attempt: int | None
    claimed_at: datetime
    deadline: datetime


@dataclass(frozen=True, kw_only=True)
class TopicFigures:
    """`messages` are in the log; `appended` counts all ever appended, including those that retention has dropped."""

    topic: str
    partitions: int
    messages: int
    appended: int


@dataclass(frozen=True, kw_only=True)
class GroupFigures:
    """The figures of `Stats` over all partitions, with the age of the oldest unresolved message in seconds. If the
    group is `bound`, lag and depth are upper bounds."""

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
