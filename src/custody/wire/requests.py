"""What requests contain. A field that is not here is refused with its path, so that no typing error goes unnoticed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Self
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from custody.errors import TooLarge
from custody.model.entities import DEFAULT_GROUP
from custody.model.lanes import Priority
from custody.model.outcomes import Kind
from custody.model.plain import plain
from custody.model.retention import Retention
from custody.wire.fields import (
    Duration,
    Large,
    Name,
    NewName,
    Offset,
    Partition,
    Positive,
    Size,
    Small,
    Text,
    Timeout,
    When,
)

ROUTING_KEY = r"^[^.*>\u0000]+(\.[^.*>\u0000]+)*$"
Partitions = Annotated[int, Meta(ge=1, le=4096)]


class Shape(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A body, or a part of one. A field that is as by default is not sent."""


class _Room(threading.local):
    """How many elements the body that a thread reads may still have."""

    left: float = math.inf


_room = _Room()


@contextmanager
def at_most(elements: int) -> Iterator[None]:
    """Refuses a body with more elements while it is read: msgspec looks at the length of a list only at its end."""
    _room.left = elements
    try:
        yield
    finally:
        _room.left = math.inf


class Element(Shape):
    """A part of which a body may have many."""

    def __post_init__(self) -> None:
        _room.left -= 1
        if _room.left < 0:
            raise TooLarge("the body names more messages than one request may have", "Send several.")


class MessageIn(Element):
    """A message to publish: `payload` is any JSON value, `payload_base64` bytes.

    A `partition` beside a `key` has to be the key's own, unless `allow_split` gives up the key's order."""

    topic: Name | None = None
    payload: msgspec.Raw | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET
    key: Text | None = None
    headers: dict[Text, Text] | None = None
    partition: Partition | None = None
    priority: Priority | None = None
    routing_key: Annotated[str, Meta(max_length=1000, pattern=ROUTING_KEY)] | None = None
    delay: Duration | None = None
    deliver_at: When | None = None
    allow_split: bool = False


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


class MessageRef(Element):
    """A message of a delivery: by its `receipt`, or by its place together with the `lease_id`.

    With a place alone it is the delivery that is live now, whoever has it; a receipt names one delivery.
    """

    receipt: Text | None = None
    lease_id: UUID | None = None
    topic: Name | None = None
    group: Name = DEFAULT_GROUP
    partition: Partition | None = None
    offset: Offset | None = None


class AckIn(MessageRef):
    """One message, or several of a lease as `offsets` (without: all that are not settled), or any as `messages`."""

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


class OutcomeIn(Element):
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

    timeout_seconds: Timeout | None = None


class EventIn(Element):
    """An event of an outbox elsewhere: it is published once for each `event_id` and number of replays."""

    event_id: UUID
    replays: Small = 0
    payload: msgspec.Raw | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET
    key: Text | None = None
    headers: dict[Text, Text] | None = None


class EventsIn(Shape):
    """Events of an outbox elsewhere, each published once. Ids are compared within the topic and the `source`, which is
    that of the API key: another key may bring the same ids."""

    events: list[EventIn]
    source: Annotated[Text, Meta(max_length=200)] = ""


class RetentionIn(Shape):
    """What a topic keeps: a time, a size, or both. Whole segments go, the oldest first."""

    time: Timeout | None = None
    size: Size | None = None
    segment_time: Timeout | None = None
    segment_size: Size | None = None
    drop_unresolved: bool = False

    @classmethod
    def of(cls, retention: Retention) -> Self:
        return cls(**plain(retention))

    def value(self) -> Retention:
        return Retention(
            time=self.time,
            size=self.size,
            segment_time=self.segment_time,
            segment_size=self.segment_size,
            drop_unresolved=self.drop_unresolved,
        )


class TopicIn(Shape):
    """A topic to make. `max_depth` caps what a group has not resolved of a partition; `starvation_limit` is how long a
    low priority waits at most."""

    name: NewName
    partitions: Partitions = 1
    max_depth: Large | None = None
    priorities: bool = False
    starvation_limit: Timeout | None = None
    retention: RetentionIn | None = None


class TopicPatch(Shape):
    """`partitions`: more of them. `retention`: null keeps everything."""

    partitions: Partitions | UnsetType = UNSET
    retention: RetentionIn | UnsetType | None = UNSET


class ProducerIn(Shape):
    """Every producer is idempotent; the field is there for those who say so."""

    producer_id: Name
    idempotent: bool = True


class TransactionAckIn(Shape):
    """Done with the commit: these offsets of the lease, or all that are not settled."""

    transaction_id: UUID
    lease_id: UUID
    offsets: list[Offset] | None = None


class JournalPatch(Shape):
    """How far back the journal goes; null: to the beginning."""

    time: Timeout | None = None
    size: Size | None = None
