"""What answers contain, for those that are sent often and for the description of the interface."""

from __future__ import annotations

import base64
from datetime import datetime
from uuid import UUID

import msgspec
from msgspec import UNSET, Struct, UnsetType

from custody.claim import Lease
from custody.lanes import Priority
from custody.model import Delayed, Message, Receipt


class Answer(Struct, frozen=True):
    """What is sent back: a status, a body that is JSON already, and further headers."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"


class ErrorBody(Struct, kw_only=True):
    code: str
    message: str
    remedy: str | UnsetType = UNSET
    path: str | UnsetType = UNSET
    lost: list[int] | UnsetType = UNSET
    request_id: str | UnsetType = UNSET


class ErrorOut(Struct):
    """Every error has this shape, with a code that does not change."""

    error: ErrorBody


class PlacedOut(Struct, kw_only=True):
    """Where a message went: a delayed one has `delay_id` and `deliver_at` in place of an offset. `duplicate`: it was
    published before."""

    topic: str
    partition: int
    offset: int | UnsetType = UNSET
    delay_id: int | UnsetType = UNSET
    deliver_at: datetime | UnsetType = UNSET
    duplicate: bool


class ReceiptsOut(Struct):
    """For each message where it went."""

    receipts: list[PlacedOut]


class AddedOut(Struct):
    """How many messages the transaction holds now."""

    transaction_id: UUID
    messages: int


class MessageOut(Struct, kw_only=True, omit_defaults=True):
    """A message: its payload is `payload`, or `payload_base64` if it is bytes."""

    topic: str
    partition: int
    offset: int
    key: str | None
    payload: msgspec.Raw | str | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET
    headers: dict[str, str]
    attempt: int
    published_at: datetime
    priority: Priority | None = None
    receipt: str | UnsetType = UNSET


class DeadOut(MessageOut, kw_only=True):
    """A message that a group has given up; `held`: later ones of its key wait for it."""

    attempts: int
    reason: str
    last_error: str | None
    errors: list[str]
    died_at: datetime
    held: bool


class DelayedOut(Struct, kw_only=True):
    """A delayed message that is not due yet."""

    topic: str
    partition: int
    delay_id: int
    deliver_at: datetime
    delayed_at: datetime
    key: str | None
    payload: msgspec.Raw | str | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET
    headers: dict[str, str]
    duplicate: bool


class LeaseOut(Struct, kw_only=True):
    """Messages under one lease. Without any there is no lease, and `reason` says why: empty, or busy."""

    lease_id: UUID | None
    deadline: datetime | None
    messages: list[MessageOut]
    reason: str | None = None
    detail: str | None = None


class SettledOut(Struct):
    """How many messages were settled, which offsets are dead by it, which later ones of a key left the lease."""

    settled: int
    dead: list[int] = []
    released: list[int] = []


class DeadlineOut(Struct):
    deadline: datetime


class FlightOut(Struct):
    in_flight_count: int
    oldest_in_flight_age_seconds: float | None


class InFlightOut(Struct):
    topic: str
    partitions: dict[str, FlightOut]


class ProducerOut(Struct, kw_only=True):
    """`last_sequence` is -1 before the first message; `last_receipt` tells where the last one went."""

    producer_id: str
    epoch: int
    last_sequence: int
    last_receipt: PlacedOut | None


class BegunOut(Struct):
    transaction_id: UUID
    expires_at: datetime


class CommittedOut(Struct):
    transaction_id: UUID
    receipts: list[PlacedOut]


class AbortedOut(Struct):
    """`aborted`: false if it was so already."""

    transaction_id: UUID
    aborted: bool


class PlaceOut(Struct):
    partition: int
    offset: int


class RedrivenOut(Struct):
    """The dead letters that were meant; with `dry_run` nothing has changed."""

    count: int
    dry_run: bool
    messages: list[PlaceOut]


class RewoundOut(Struct):
    partition: int
    target: int
    messages: int


class RewindOut(Struct):
    dry_run: bool
    partitions: list[RewoundOut]


class ChangedOut(Struct):
    """Whether there was anything to change."""

    changed: bool


class CountOut(Struct):
    count: int


class DueOut(Struct):
    """Seconds until something is due by itself; null if nothing is."""

    due: float | None


class NewsOut(Struct):
    """`token` goes into the next question. `news`: something may have come since the one that was given."""

    token: str
    news: bool


class HealthOut(Struct):
    status: str


def placed_out(placed: Receipt | Delayed) -> PlacedOut:
    if isinstance(placed, Receipt):
        return PlacedOut(
            topic=placed.topic, partition=placed.partition, offset=placed.offset, duplicate=placed.duplicate
        )
    return PlacedOut(
        topic=placed.topic,
        partition=placed.partition,
        delay_id=placed.delay_id,
        deliver_at=placed.deliver_at,
        duplicate=placed.duplicate,
    )


def lease_out(lease: Lease) -> LeaseOut:
    if not lease:
        return LeaseOut(lease_id=None, deadline=None, messages=[], reason=lease.reason, detail=lease.detail)
    lease_id = lease.lease_id
    return LeaseOut(
        lease_id=lease_id,
        deadline=lease.deadline,
        messages=[message_out(message, f"{lease_id}:{message.offset}") for message in lease.messages],
    )


def message_out(message: Message, receipt: str | UnsetType = UNSET) -> MessageOut:
    payload = message.payload
    bytes_given = isinstance(payload, bytes)
    return MessageOut(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        key=message.key,
        payload=UNSET if bytes_given else payload,
        payload_base64=base64.b64encode(payload).decode() if bytes_given else UNSET,
        headers=message.headers,
        attempt=message.attempt,
        published_at=message.published_at,
        priority=message.priority,
        receipt=receipt,
    )
