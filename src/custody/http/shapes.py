"""What requests contain. A field that is not here is refused with its path, so that no typing error goes unnoticed."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from custody.lanes import Priority
from custody.outcomes import Kind

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Small = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Partition = Small
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Large = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Duration = str | float
"""`"30s"`, `"100ms"`, or seconds."""
Size = str | int
Reason = str | None


class Shape(Struct, forbid_unknown_fields=True, kw_only=True):
    """A body, or a part of one."""


class MessageIn(Shape):
    """A message to publish: `payload` is any JSON value, `payload_base64` bytes."""

    topic: Name | None = None
    payload: msgspec.Raw | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET
    key: str | None = None
    headers: dict[str, str] | None = None
    partition: Partition | None = None
    priority: Priority | None = None
    routing_key: str | None = None
    delay: Duration | None = None
    deliver_at: datetime | None = None


class PublishIn(MessageIn):
    """One message, or many as `messages`; `topic` is then the one of those that name none.

    With `producer_id`, `epoch` and the `sequence` of its first message a repeat returns the first receipts. With
    `transaction_id` the messages are added to the transaction; `first` numbers them, so that a repeat adds nothing.
    """

    messages: list[MessageIn] | UnsetType = UNSET
    producer_id: Name | None = None
    epoch: Positive | None = None
    sequence: Offset | None = None
    expected_offset: Offset | None = None
    transaction_id: UUID | None = None
    first: Small | None = None


class ReceiveQuery(Shape):
    group: Name = "default"
    max: Annotated[int, Meta(ge=1, le=10_000)] = 1
    visibility_timeout: Duration | None = None
    wait: Duration = 0.0
    auto_ack: bool = False


class MessageRef(Shape):
    """A message of a delivery: by its `receipt`, or by its place together with the `lease_id`.

    With a place alone it has to be on its first delivery, else the answer is `receipt_required`.
    """

    receipt: str | None = None
    lease_id: UUID | None = None
    topic: Name | None = None
    group: Name = "default"
    partition: Partition | None = None
    offset: Offset | None = None


class AckIn(MessageRef):
    """One message, or several of a lease as `offsets` (all that it holds, without offsets), or any as `messages`."""

    offsets: list[Offset] | None = None
    messages: list[MessageRef] | None = None


class NackIn(AckIn):
    """`requeue`: tried again by the policy, or after `delay`; false: dead at once."""

    requeue: bool = True
    error: str | None = None
    delay: Duration | None = None


class LaterIn(AckIn, kw_only=True):
    """Not now: ready again after that time, and the delivery does not count."""

    after: Duration


class OutcomeIn(Shape):
    """What became of one offset: ack, nack, reject, dead, later or release."""

    offset: Offset
    outcome: Kind
    error: str | None = None
    delay: Duration | None = None


class SettleIn(Shape):
    """Many outcomes of one lease, in one commit."""

    lease_id: UUID
    outcomes: list[OutcomeIn]


class ExtendIn(MessageRef):
    """The deadline becomes now plus the timeout: for the message, or with a lease alone for all of it."""

    timeout_seconds: Duration | None = None


class ReplayIn(Shape):
    dlq_topic: Name
    partition: Partition
    offset: Offset
    target_topic: Name | None = None
    reason: Reason = None


class EventIn(Shape):
    """An event of an outbox elsewhere: it is published once for each `event_id` and number of replays."""

    event_id: UUID
    replays: Small = 0
    payload: msgspec.Raw | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET
    key: str | None = None
    headers: dict[str, str] | None = None


class EventsIn(Shape):
    events: list[EventIn]


class RetentionIn(Shape):
    time: Duration | None = None
    size: Size | None = None
    segment_time: Duration | None = None
    segment_size: Size | None = None
    drop_unresolved: bool = False


class TopicIn(Shape):
    name: Name
    partitions: Positive = 1
    max_depth: Large | None = None
    priorities: bool = False
    starvation_limit: Duration | None = None
    retention: RetentionIn | None = None


class TopicPatch(Shape):
    """`partitions`: more of them. `retention`: null keeps everything."""

    partitions: Positive | UnsetType = UNSET
    retention: RetentionIn | UnsetType | None = UNSET


class BindingIn(Shape):
    pattern: str | None = None
    headers: dict[str, str] | None = None


Bindings = list[BindingIn | str]


class GroupIn(Shape):
    """`start` is earliest, latest, an offset, or a time. A policy has the fields of `Policy`, its backoff a `kind`."""

    name: Name
    policy: dict[str, Any] | None = None
    start: str | Offset = "earliest"
    bare: bool = False
    bindings: Bindings | None = None


class GroupPatch(Shape):
    """Fields of `policy` that are given replace those of the group; `bindings` all of its bindings."""

    policy: dict[str, Any] | UnsetType = UNSET
    bindings: Bindings | UnsetType | None = UNSET


class RedriveIn(Shape):
    """Which dead letters: all, or those that fulfil every condition that is given. `where_error` is a LIKE pattern."""

    where_error: str | None = None
    key: str | None = None
    partition: Partition | None = None
    offsets: list[Offset] | None = None
    died_from: datetime | None = None
    died_until: datetime | None = None
    limit: Positive | None = None
    dry_run: bool = False
    reason: Reason = None


class RewindIn(Shape):
    to_offset: Offset | None = None
    to_time: datetime | None = None
    partition: Partition | None = None
    dry_run: bool = False
    reason: Reason = None


class ReasonIn(Shape):
    reason: Reason = None


class KeyIn(Shape):
    key: str
    reason: Reason = None


class SkipIn(Shape):
    partition: Partition
    offset: Offset
    reason: Reason = None


class CommitIn(Shape):
    """For a bare group: everything below `next_offset` is done."""

    partition: Partition
    next_offset: Offset


class ProducerIn(Shape):
    """Every producer is idempotent; the field is there for those who say so."""

    producer_id: Name
    idempotent: bool = True


class BeginIn(Shape):
    """Without an epoch it is the present one of the producer."""

    producer_id: Name
    epoch: Positive | None = None
    timeout: Duration | None = None


class TransactionIn(Shape):
    transaction_id: UUID


class AbortIn(TransactionIn):
    reason: Reason = None


class TransactionAckIn(TransactionIn):
    """Done with the commit: these offsets of the lease, or all that it holds then."""

    lease_id: UUID
    offsets: list[Offset] | None = None


class MaintainIn(Shape):
    topic: Name | None = None


class JournalPatch(Shape):
    time: Duration | None = None
    size: Size | None = None


class NoQuery(Shape):
    """No parameters."""


class LimitQuery(Shape):
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 1000


class DelayedQuery(Shape):
    key: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 100


class ReadQuery(Shape):
    offset: Offset | None = None
    time: datetime | None = None
    max: Annotated[int, Meta(ge=1, le=10_000)] = 100


class FetchQuery(Shape):
    partition: Partition = 0
    max: Annotated[int, Meta(ge=1, le=10_000)] = 100


class EpochQuery(Shape):
    epoch: Positive | None = None


class NewsQuery(Shape):
    """`since` is the token of the last answer; without one the answer comes at once."""

    since: Annotated[str, Meta(max_length=100)] | None = None
    wait: Duration = 0.0


class GroupQuery(Shape):
    group: Name | None = None


class TopicGroupQuery(Shape):
    topic: Name | None = None
    group: Name | None = None
