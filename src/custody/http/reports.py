"""What is told of topics, groups, the journal and handling times."""

from __future__ import annotations

from datetime import datetime

from msgspec import Struct

from custody.http.policies import PolicyOut


class RetentionOut(Struct, kw_only=True):
    """What a topic keeps: the last so many seconds, and no more than so many bytes."""

    time: float | None
    size: int | None
    segment_time: float | None
    segment_size: int | None
    drop_unresolved: bool


class TopicOut(Struct, kw_only=True):
    """`partitions` are those of the log, `tails` their next offsets."""

    name: str
    partitions: int
    message_count: int
    first_offsets: list[int]
    tails: list[int]
    max_depth: int | None
    priorities: bool
    starvation_limit: float | None
    retention: RetentionOut | None
    created_at: datetime


class BindingOut(Struct, kw_only=True):
    pattern: str | None
    headers: dict[str, str] | None


class GroupOut(Struct, kw_only=True):
    topic: str
    name: str
    bare: bool
    policy: PolicyOut | None
    paused_at: datetime | None
    paused_reason: str | None
    created_at: datetime
    bindings: list[BindingOut]


class JournalPartOut(Struct, kw_only=True):
    part: int
    created_at: datetime
    sealed_at: datetime | None
    bytes: int


class JournalOut(Struct, kw_only=True):
    """What the journal keeps, in seconds and bytes (null: everything), and its parts."""

    keep_time: float | None
    keep_size: int | None
    dropped_until: datetime | None
    parts: list[JournalPartOut]


class HandlingOut(Struct, kw_only=True):
    """How long the last leases of a group took, in seconds; `expired_alive` of them were too short."""

    topic: str
    group: str
    visibility_timeout: float
    leases: int
    p50: float | None
    p99: float | None
    slowest: float | None
    expired: int
    expired_alive: int
    recommended_visibility_timeout: float | None
