"""Answers about topics, groups, the journal and handling times."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Self
from uuid import UUID

from msgspec import Struct

from custody.model.entities import Group, Journal, JournalPart, Topic
from custody.model.insights import HandlingTime
from custody.model.retention import Retention
from custody.model.routing import Binding
from custody.wire.policies import PolicyOut
from custody.wire.settings import answered


class RetentionOut(answered(Retention)):  # type: ignore[misc]  # its fields are those of the retention
    """The retention of a topic, in seconds and bytes."""


class TopicOut(Struct, kw_only=True):
    """`partitions` are those of the log, `tails` their next offsets. A topic that is deleted and created again has
    another `uid`."""

    name: str
    uid: UUID
    partitions: int
    message_count: int
    first_offsets: tuple[int, ...]
    tails: tuple[int, ...]
    max_depth: int | None
    priorities: bool
    starvation_limit: float | None
    retention: RetentionOut | None
    created_at: datetime

    def value(self) -> Topic:
        return Topic(
            name=self.name,
            uid=self.uid,
            partitions=self.partitions,
            max_depth=self.max_depth,
            created_at=self.created_at,
            tails=self.tails,
            first_offsets=self.first_offsets,
            retention=None if self.retention is None else self.retention.value(),
            starvation_limit=_time(self.starvation_limit),
        )


def _time(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)


class BindingOut(Struct, kw_only=True):
    pattern: str | None
    headers: dict[str, str] | None

    def value(self) -> Binding:
        return Binding(self.pattern, headers=self.headers)


class GroupOut(Struct, kw_only=True):
    topic: str
    name: str
    bare: bool
    policy: PolicyOut | None
    paused_at: datetime | None
    paused_reason: str | None
    created_at: datetime
    bindings: list[BindingOut]

    def value(self) -> Group:
        return Group(
            topic=self.topic,
            name=self.name,
            bare=self.bare,
            policy=None if self.policy is None else self.policy.value(),
            paused_at=self.paused_at,
            paused_reason=self.paused_reason,
            created_at=self.created_at,
            bindings=tuple(binding.value() for binding in self.bindings),
        )


class JournalPartOut(Struct, kw_only=True):
    part: int
    created_at: datetime
    sealed_at: datetime | None
    bytes: int

    def value(self) -> JournalPart:
        return JournalPart(part=self.part, created_at=self.created_at, sealed_at=self.sealed_at, bytes=self.bytes)


class JournalOut(Struct, kw_only=True):
    """The retention of the journal in seconds and bytes (null: everything), and its parts."""

    keep_time: float | None
    keep_size: int | None
    dropped_until: datetime | None
    parts: list[JournalPartOut]

    def value(self) -> Journal:
        return Journal(
            keep_time=_time(self.keep_time),
            keep_size=self.keep_size,
            dropped_until=self.dropped_until,
            parts=tuple(part.value() for part in self.parts),
        )


class HandlingOut(Struct, kw_only=True):
    """How long the last leases of a group took, in seconds; `expired_alive` counts those whose timeout was too
    short."""

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

    @classmethod
    def of(cls, found: HandlingTime) -> Self:
        return cls(**asdict(found), recommended_visibility_timeout=found.recommended)

    def value(self) -> HandlingTime:
        return HandlingTime(**{name: getattr(self, name) for name in self.__struct_fields__[:-1]})
