"""The state of all groups, workers, schedules and the outbox at one look, the worst first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from custody.model.insights import TopicFigures

WINDOW = 60.0
"""Seconds over which rates are taken. A group that has waited for longer without a worker has none."""
TROUBLES = (
    *("pipeline failed", "pipeline gone", "breaker open", "breaker probing", "no worker", "paused"),
    *("pipeline retrying", "dead letters"),
)
"""What may be wrong with a group, the worst first."""


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """A worker that holds messages of a group, or worked for it in the last minute. Ages are in seconds, rates in
    messages per second. Somebody who finds nothing to claim leaves no trace, and is not known."""

    topic: str
    group: str
    worker: str
    in_flight: int
    oldest_lease_age: float | None
    last_claim_age: float | None
    claimed_rate: float
    done_rate: float
    failed_rate: float


@dataclass(frozen=True, kw_only=True)
class GroupStatus:
    """The figures of a group, its rates in the last minute, and what is wrong with it. If it is `bound`, lag and depth
    are upper bounds. `pipeline` is the state of its pipeline, if it has one."""

    topic: str
    group: str
    trouble: tuple[str, ...]
    lag: int
    waiting: int
    in_flight: int
    parked: int
    dead: int
    depth: int
    oldest_unresolved_age: float | None
    claimed_rate: float
    done_rate: float
    failed_rate: float
    workers: int
    last_claim_age: float | None
    paused: bool
    breaker: str | None
    bound: bool
    pipeline: str | None


@dataclass(frozen=True, kw_only=True)
class ScheduleStatus:
    """A schedule that is failing, late or unattended."""

    name: str
    topic: str
    state: str
    next_at: datetime
    last_error: str | None


@dataclass(frozen=True, kw_only=True)
class OutboxStatus:
    """The backlog of one destination of the outbox: null is events without one."""

    destination: str | None
    backlog: int
    due: int
    retrying: int
    claimed: int
    dead: int
    oldest_pending: datetime | None


@dataclass(frozen=True, kw_only=True)
class Status:
    """Everything at one look: topics by name, groups with the worst first, schedules that are in trouble."""

    topics: tuple[TopicFigures, ...]
    groups: tuple[GroupStatus, ...]
    schedules: tuple[ScheduleStatus, ...]
    outbox: tuple[OutboxStatus, ...]


def troubles(
    *,
    lag: int,
    dead: int,
    oldest_unresolved_age: float | None,
    workers: int,
    paused: bool,
    breaker: str | None,
    pipeline: str | None,
) -> tuple[str, ...]:
    """What is wrong with a group, the worst first."""
    found = {f"pipeline {pipeline}", f"breaker {breaker}"}
    if paused:
        found.add("paused")
    elif lag and not workers and (oldest_unresolved_age or 0) > WINDOW and pipeline not in ("running", "retrying"):
        found.add("no worker")
    if dead:
        found.add("dead letters")
    return tuple(one for one in TROUBLES if one in found)


def worst_first(groups: Iterable[GroupStatus]) -> tuple[GroupStatus, ...]:
    """By their worst trouble, then by the age of their oldest unresolved message."""

    def rank(one: GroupStatus) -> tuple[object, ...]:
        worst = TROUBLES.index(one.trouble[0]) if one.trouble else len(TROUBLES)
        return (worst, -(one.oldest_unresolved_age or 0.0), -one.dead, -one.depth, one.topic, one.group)

    return tuple(sorted(groups, key=rank))
