"""The arguments and results of verbs: messages, receipts, dead letters, topics, groups, figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from custody.model.lanes import Priority
from custody.model.limits import NAME_LENGTH
from custody.model.policy import Duration, Policy
from custody.model.retention import Retention
from custody.model.routing import ROUTING_KEY, Binding
from custody.model.typed import typed_as

T = TypeVar("T")

Payload = Any
"""bytes, text, or a JSON value (dict, list, number, boolean, None). Consumers get exactly what was published. Also an
object with typed fields, a UUID, a time or a Decimal, which are published as JSON (docs/publishing.md)."""
KEY_BYTES = 2_000
"""Most bytes of a key in UTF-8, because index entries in PostgreSQL are limited."""

NAME = rf"^[A-Za-z0-9_][A-Za-z0-9._-]{{0,{NAME_LENGTH - 1}}}$"
"""What a topic or a group can be called."""

DEFAULT_GROUP = "default"
"""The group of HTTP requests without a group. It is created when it is missing."""


@dataclass(frozen=True)
class Outgoing:
    """One message to publish. The key determines the partition and is the unit of order. Bindings of groups match the
    routing key. A priority (default: normal) needs a topic with priorities.

    If both key and partition are given, the partition must be the key's own, because a key in two partitions has no
    order. `allow_split` allows another one.

    With `delay` or `deliver_at` it is a delayed message: nobody sees it before its time.
    """

    payload: Payload
    key: str | None = field(default=None, kw_only=True)
    headers: Mapping[str, str] | None = field(default=None, kw_only=True)
    partition: int | None = field(default=None, kw_only=True)
    priority: Priority | None = field(default=None, kw_only=True)
    routing_key: str | None = field(default=None, kw_only=True)
    delay: Duration | None = field(default=None, kw_only=True)
    deliver_at: datetime | None = field(default=None, kw_only=True)
    allow_split: bool = field(default=False, kw_only=True)

    @property
    def fixed(self) -> bool:
        """Whether it stays in its given partition when the topic grows; otherwise it follows its key."""
        return self.partition is not None and (self.key is None or self.allow_split)

    @property
    def delayed(self) -> bool:
        return self.delay is not None or self.deliver_at is not None


def batch_of(messages: Iterable[Outgoing | Payload]) -> list[Outgoing]:
    """Messages to publish; a plain payload becomes a message without a key."""
    return [message if isinstance(message, Outgoing) else Outgoing(message) for message in messages]


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Where a message was published. `duplicate`: it had been published before, and this is the first receipt."""

    topic: str
    partition: int
    offset: int
    duplicate: bool = False


class Replayed(Receipt, frozen=True, gc=False):
    """Where a dead letter was published. `resolved`: the dead message is now done; otherwise it was no longer dead."""

    resolved: bool = True


class Delayed(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of a delayed message, with an id instead of an offset. The id cancels it until it is due."""

    topic: str
    partition: int
    delay_id: int
    deliver_at: datetime
    duplicate: bool = False


class Waiting(Delayed, frozen=True, kw_only=True):
    """A delayed message that is not due yet."""

    key: str | None
    payload: Payload
    headers: dict[str, str]
    delayed_at: datetime


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the log. `attempt` counts deliveries from 1; it is 0 for a plain read. `priority` is None on a
    topic without priorities."""

    topic: str
    partition: int
    offset: int
    key: str | None
    payload: Payload
    headers: dict[str, str]
    attempt: int
    published_at: datetime
    priority: Priority | None = None
    topic_uid: UUID | None = None
    """Id of the topic. A topic that is deleted and created again has another one, and its offsets start at 0 again."""

    @property
    def routing_key(self) -> str | None:
        return self.headers.get(ROUTING_KEY)

    def as_(self, kind: type[T]) -> T:
        """The payload as a value of this type: a dataclass, a Struct, a pydantic model, or any other that msgspec
        decodes. Raises PayloadMismatch, with the path of the field, if it does not fit; in a handler that means dead.
        """
        return typed_as(self.payload, kind)


class DeadLetter(Message, frozen=True, kw_only=True):
    """A message that is dead in a group, with its errors."""

    attempts: int
    reason: str
    last_error: str | None
    last_traceback: str | None = None
    """The end of the traceback of the last error."""
    errors: tuple[str, ...]
    died_at: datetime
    held: bool


@dataclass(frozen=True, kw_only=True)
class Topic:
    """`partitions` are those of the log: with priorities, five for each requested one."""

    name: str
    uid: UUID
    """Changes if the topic is deleted and created again."""
    partitions: int
    max_depth: int | None
    created_at: datetime
    tails: tuple[int, ...]
    first_offsets: tuple[int, ...]
    retention: Retention | None = None
    """None: everything is kept."""
    starvation_limit: timedelta | None = None
    """Messages that wait longer come first. None: the topic has no priorities."""

    @property
    def priorities(self) -> bool:
        return self.starvation_limit is not None

    @property
    def message_count(self) -> int:
        return sum(tail - first for tail, first in zip(self.tails, self.first_offsets, strict=True))


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A range of a topic over all its partitions, dropped as a whole. The last one is open: `sealed_at` is None.

    `held_group` has not resolved `held_partition`/`held_offset`, which keeps the oldest segment from being dropped.
    """

    segment: int
    created_at: datetime
    sealed_at: datetime | None
    messages: int
    bytes: int
    from_time: datetime | None
    until_time: datetime | None
    held_group: str | None
    held_partition: int | None
    held_offset: int | None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Copied events of dead letters whose segments were dropped."""

    events: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class JournalPart:
    """A part of the journal, one table. The last one is open: `sealed_at` is None."""

    part: int
    created_at: datetime
    sealed_at: datetime | None
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The retention of the journal (None: everything), until when it was dropped, and its parts."""

    keep_time: timedelta | None
    keep_size: int | None
    dropped_until: datetime | None
    parts: tuple[JournalPart, ...]


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """What upkeep did with a segment or, without a topic, with a part of the journal.

    `did` is sealed, dropped, held (by `held_group`) or busy. `kept` dead letters were copied. `lost` unresolved
    deliveries were dropped, if the topic allows it.
    """

    topic: str | None
    did: str
    segment: int
    messages: int | None
    bytes: int
    kept: int | None
    lost: int | None
    held_group: str | None
    held_partition: int | None
    held_offset: int | None


@dataclass(frozen=True, kw_only=True)
class Group:
    topic: str
    name: str
    bare: bool
    policy: Policy | None
    paused_at: datetime | None
    paused_reason: str | None
    created_at: datetime
    bindings: tuple[Binding, ...] = ()
    """Its bindings; none means every message."""


@dataclass(frozen=True, kw_only=True)
class PartitionStats:
    """The figures of a group on one partition. `tail` is the durable end of the log: the next offset."""

    partition: int
    first_offset: int
    tail: int
    frontier: int
    lag: int
    waiting: int
    in_flight: int
    holes: int
    parked: int
    dead: int
    depth: int
    oldest_unresolved: int | None
    oldest_unresolved_at: datetime | None
    priority: Priority | None = None


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The figures of a group.

    lag: never delivered · waiting: to retry · in_flight: leased · parked: behind their key · depth: everything
    unresolved, which is all of these and held dead ones · dead: dead letters · holes: gaps among the resolved offsets.

    If the group is `bound`, lag, depth and the oldest unresolved message include messages that no claim has scanned
    yet, whether they match or not: matching them would cost as much as claiming them.
    """

    topic: str
    group: str
    lag: int
    waiting: int
    in_flight: int
    holes: int
    parked: int
    dead: int
    depth: int
    oldest_unresolved: datetime | None
    tail: tuple[int, ...]
    partitions: tuple[PartitionStats, ...]
    paused_reason: str | None
    paused_at: datetime | None
    breaker: str | None
    """closed, open or probing; None without a breaker."""
    breaker_reason: str | None
    bound: bool = False
    """Whether it has bindings: then lag and depth are upper bounds."""


@dataclass(frozen=True, kw_only=True)
class BlockedKey:
    """A key that cannot go on: `why` is backoff, retrying, held or in flight; `parked` messages wait behind it.
    `worker` had the message last that blocks it, and failed or postponed it."""

    partition: int
    key: str
    blocked_by: int | None
    why: str
    attempts: int | None
    run_at: datetime | None
    last_error: str | None
    worker: str | None
    since: datetime
    parked: int


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """The state that a keyed pipeline keeps for a key; the message that made it, and the claim in which it was done.

    From `expires_at` on it counts as absent."""

    key: str
    state: Any
    partition: int
    offset: int
    claim: int
    updated_at: datetime
    expires_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One event in the history of a message in a group."""

    at: datetime
    group: str
    kind: str
    attempt: int | None
    worker: str | None
    error: str | None
    traceback: str | None = None
    """Of a failure: the end of its traceback."""
    lease_id: UUID | None


@dataclass(frozen=True, kw_only=True)
class Producer:
    """The state of an idempotent producer: its last sequence and that one's receipt."""

    producer_id: str
    epoch: int
    last_sequence: int
    last_receipt: Receipt | Delayed | None


@dataclass(frozen=True, kw_only=True)
class OpenTransaction:
    """A producer's transaction that is neither committed nor aborted, and its contents so far."""

    transaction_id: UUID
    producer_id: str
    epoch: int
    begun_at: datetime
    expires_at: datetime
    messages: int
    acks: int


@dataclass(frozen=True, kw_only=True)
class Rewound:
    """What a rewind makes ready again on one partition."""

    partition: int
    target: int
    messages: int


@dataclass(frozen=True, kw_only=True)
class Settled:
    """The result of a settle: how many messages it settled, which of them are dead, and which later messages of a
    failed key it released from the lease. `already`: the same lease had settled some of them with this outcome
    before."""

    settled: int
    dead: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    already: bool = False
