"""Values of the interface and those of Custody, there and back."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET, Struct, UnsetType

from custody.codec import encode_message
from custody.delays import require_time
from custody.errors import PartitionNotFound
from custody.lanes import Priority
from custody.model import DeadLetter, Delayed, Group, Message, Outgoing, Payload, Receipt, Topic, Waiting
from custody.plain import DURATIONS
from custody.policy import Policy, seconds_or_none
from custody.retention import Retention
from custody.routing import Binding


class PlacedIn(Struct, kw_only=True):
    topic: str
    partition: int
    offset: int | UnsetType = UNSET
    delay_id: int | UnsetType = UNSET
    deliver_at: datetime | None = None
    duplicate: bool = False

    def value(self) -> Receipt | Delayed:
        if self.offset is not UNSET:
            return Receipt(self.topic, self.partition, self.offset, self.duplicate)
        assert self.delay_id is not UNSET
        assert self.deliver_at is not None
        return Delayed(
            topic=self.topic,
            partition=self.partition,
            delay_id=self.delay_id,
            deliver_at=self.deliver_at,
            duplicate=self.duplicate,
        )


class _Paid(Struct, kw_only=True):
    """What has a payload, in one of its two forms."""

    payload: Any = None
    payload_base64: str | UnsetType = UNSET

    def paid(self) -> Payload:
        return self.payload if self.payload_base64 is UNSET else base64.b64decode(self.payload_base64)


class MessageIn(_Paid, kw_only=True):
    topic: str
    partition: int
    offset: int
    key: str | None
    headers: dict[str, str]
    attempt: int
    published_at: datetime
    priority: Priority | None = None

    def value(self) -> Message:
        return Message(**_given(self))


class DeadIn(MessageIn, kw_only=True):
    attempts: int
    reason: str
    last_error: str | None
    errors: tuple[str, ...]
    died_at: datetime
    held: bool

    def value(self) -> DeadLetter:
        return DeadLetter(**_given(self))


class WaitingIn(_Paid, kw_only=True):
    topic: str
    partition: int
    delay_id: int
    deliver_at: datetime
    duplicate: bool = False
    key: str | None
    headers: dict[str, str]
    delayed_at: datetime

    def value(self) -> Waiting:
        return Waiting(**_given(self))


def _given(one: _Paid) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in one.__struct_fields__ if name != "payload_base64"}
    return {**fields, "payload": one.paid()}


class LeaseIn(Struct, kw_only=True):
    lease_id: UUID | None
    deadline: datetime | None
    messages: list[MessageIn]
    reason: str | None = None
    detail: str | None = None


class TopicIn(Struct, kw_only=True):
    name: str
    partitions: int
    max_depth: int | None
    created_at: datetime
    tails: tuple[int, ...]
    first_offsets: tuple[int, ...]
    retention: dict[str, Any] | None
    starvation_limit: float | None

    def value(self) -> Topic:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        limit = None if self.starvation_limit is None else timedelta(seconds=self.starvation_limit)
        kept = None if self.retention is None else Retention(**_durations(self.retention))
        return Topic(**{**fields, "starvation_limit": limit, "retention": kept})


class BindingIn(Struct, kw_only=True):
    pattern: str | None = None
    headers: dict[str, str] | None = None


class GroupIn(Struct, kw_only=True):
    topic: str
    name: str
    bare: bool
    policy: dict[str, Any] | None
    paused_at: datetime | None
    paused_reason: str | None
    created_at: datetime
    bindings: list[BindingIn]

    def value(self) -> Group:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        policy = None if self.policy is None else policy_of(self.policy)
        bindings = tuple(Binding(one.pattern, headers=one.headers) for one in self.bindings)
        return Group(**{**fields, "policy": policy, "bindings": bindings})


def policy_of(given: Mapping[str, Any]) -> Policy:
    """A policy as the database itself would give it: its durations are timedeltas."""
    parts = {name: value if not isinstance(value, Mapping) else _durations(value) for name, value in given.items()}
    return Policy.from_mapping(_durations(parts))


def _durations(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: timedelta(seconds=value) if name in DURATIONS and value is not None else value
        for name, value in given.items()
    }


def same_policy(one: Policy | None, other: Policy | None) -> bool:
    """Whether two mean the same, however their durations are written."""
    return (one and one.columns()) == (other and other.columns())


def fits(kept: Retention | None, asked: Retention | None) -> bool:
    """Whether a topic keeps what was asked for; what was left open has been filled in."""
    if kept is None or asked is None:
        return kept is asked
    found = kept.columns()
    return all(found[name] == value for name, value in asked.columns().items() if value is not None)


def outgoing(message: Outgoing) -> dict[str, Any]:
    """A message to publish. What could not be stored is refused here, as the direct connection does."""
    if message.delayed:
        require_time(message)
    _, kind, payload, headers = encode_message(message)
    require_partition(message.partition)
    body: dict[str, Any] = {"payload": msgspec.Raw(payload)} if kind == b"j" else {}
    if kind == b"t":
        body["payload"] = payload.decode()
    elif kind == b"b":
        body["payload_base64"] = base64.b64encode(payload).decode()
    optional = {
        "key": message.key,
        "headers": None if headers is None else msgspec.Raw(headers),  # the routing key is among them
        "partition": message.partition,
        "priority": message.priority,
        "delay": seconds_or_none(message.delay),
        "deliver_at": message.deliver_at,
    }
    return body | {name: value for name, value in optional.items() if value is not None}


def require_partition(partition: int | None) -> None:
    """Refuses what can be no partition: in a path or a body it would be taken for a mistake of the client's."""
    if partition is not None and not 0 <= partition < 2**31:
        raise PartitionNotFound(f"there is no partition {partition}")
