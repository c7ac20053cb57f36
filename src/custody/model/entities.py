"""What goes in and out of Custody: messages, receipts, leases' contents, dead letters, figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from custody.model.lanes import Priority
from custody.model.policy import Duration, Policy
from custody.model.retention import Retention
from custody.model.routing import ROUTING_KEY, Binding

Payload = Any
"""bytes, text, or a JSON value (dict, list, number, boolean, None). It comes back as it went in."""
KEY_BYTES = 2_000
"""A key has no more, in UTF-8: it stands in indexes of the database, whose entries are bounded."""

NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$"
"""What a topic or a group can be called."""

DEFAULT_GROUP = "default"
"""The group of those who name none over HTTP. It is made when it is missing."""


@dataclass(frozen=True)
class Outgoing:
    """One message to publish. A key picks the partition and is the unit of order; groups are bound by routing keys; a
    priority (normal, if none is given) needs a topic that has priorities.

    A partition beside a key has to be the key's own, because a key in two partitions has no order. `allow_split` lets
    it be another one.

    With `delay` or `deliver_at` it is a delayed one: nobody sees it before its time.
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
        """Whether it stays in the partition that is named when its topic grows; else it goes where its key goes."""
        return self.partition is not None and (self.key is None or self.allow_split)

    @property
    def delayed(self) -> bool:
        return self.delay is not None or self.deliver_at is not None


def batch_of(messages: Iterable[Outgoing | Payload]) -> list[Outgoing]:
    """Messages as they are published: a payload alone is one without a key."""
    return [message if isinstance(message, Outgoing) else Outgoing(message) for message in messages]


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Where a message went. `duplicate`: it had been published before, and this is the first receipt."""

    topic: str
    partition: int
    offset: int
    duplicate: bool = False


class Replayed(Receipt, frozen=True, gc=False):
    """Where a dead letter went. `resolved`: the dead message counts as done by it; else it was not dead any more."""

    resolved: bool = True


class Delayed(msgspec.Struct, frozen=True, kw_only=True):
    """What a delayed message has in place of an offset: by its id it can be cancelled until it is due."""

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
    """One message of the log, as delivered. `attempt` counts deliveries from 1; it is 0 for a plain read. `priority` is
    None on a topic without priorities."""

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
    """Of the topic: a topic that is deleted and made anew has another one, and counts its offsets from 0 again."""

    @property
    def routing_key(self) -> str | None:
        return self.headers.get(ROUTING_KEY)


class DeadLetter(Message, frozen=True, kw_only=True):
    """A message that a group has given up, with everything known about why."""

    attempts: int
    reason: str
    last_error: str | None
    errors: tuple[str, ...]
    died_at: datetime
    held: bool


@dataclass(frozen=True, kw_only=True)
class Topic:
    """`partitions` are those of the log: with priorities five, one for each, for every one that was asked for."""

    name: str
    uid: UUID
    """A topic that is deleted and made anew has another one."""
    partitions: int
    max_depth: int | None
    created_at: datetime
    tails: tuple[int, ...]
    first_offsets: tuple[int, ...]
    retention: Retention | None = None
    """None: everything is kept."""
    starvation_limit: timedelta | None = None
    """After so long what waits goes first. None: the topic has no priorities."""

    @property
    def priorities(self) -> bool:
        return self.starvation_limit is not None

    @property
    def message_count(self) -> int:
        return sum(tail - first for tail, first in zip(self.tails, self.first_offsets, strict=True))


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of a topic over all its partitions, which goes as a whole. The last one is open: `sealed_at` is None.

    `held_group` has not resolved `held_partition`/`held_offset`, and so keeps the oldest segment from being dropped.
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
    """Events of dead letters whose segments are gone."""

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
    """What the journal keeps (None: everything), until when it has been dropped, and its parts."""

    keep_time: timedelta | None
    keep_size: int | None
    dropped_until: datetime | None
    parts: tuple[JournalPart, ...]


@dataclass(frozen=True, kw_only=True)
class Upkeep:
    """What upkeep did to a segment, or, without a topic, to a part of the journal.

    `did` is sealed, dropped, held (by the group that is named) or busy. `kept` dead letters were kept aside; `lost`
    deliveries were given up, where the topic allows it.
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
    """What it gets of the topic; none: every message."""


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

    lag: never handed out · waiting: to be tried again · in_flight: leased · parked: behind their key · depth: all of
    these and held dead ones, what is not resolved · dead: dead letters · holes: gaps among the resolved offsets.

    Of a group that is bound to a part of the log, lag, depth and the oldest unresolved message include what it has not
    looked at yet, whether it is bound to it or not: matching all of that would cost as much as claiming it.
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
    """A key that cannot go on: `why` is backoff, retrying, held or in flight; `parked` messages wait behind it."""

    partition: int
    key: str
    blocked_by: int | None
    why: str
    attempts: int | None
    run_at: datetime | None
    last_error: str | None
    since: datetime
    parked: int


@dataclass(frozen=True, kw_only=True)
class HistoryEntry:
    """One thing that happened to a message in a group."""

    at: datetime
    group: str
    kind: str
    attempt: int | None
    worker: str | None
    error: str | None
    lease_id: UUID | None


@dataclass(frozen=True, kw_only=True)
class Producer:
    """Where an idempotent producer stands: its last sequence, and the receipt of it."""

    producer_id: str
    epoch: int
    last_sequence: int
    last_receipt: Receipt | Delayed | None


@dataclass(frozen=True, kw_only=True)
class OpenTransaction:
    """A producer's transaction that is neither committed nor aborted, and what it holds so far."""

    transaction_id: UUID
    producer_id: str
    epoch: int
    begun_at: datetime
    expires_at: datetime
    messages: int
    acks: int


@dataclass(frozen=True, kw_only=True)
class Rewound:
    """What a rewind gave back on one partition."""

    partition: int
    target: int
    messages: int


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What a settle did: how many messages are settled by it, which of them are dead, and which later messages of a
    stopped key it released from the lease. `already`: the same lease had settled some of them so before."""

    settled: int
    dead: tuple[int, ...] = ()
    released: tuple[int, ...] = ()
    already: bool = False
