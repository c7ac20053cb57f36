"""Messages and receipts in answers."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any, Self
from uuid import UUID

from msgspec import UNSET, Struct, UnsetType

from custody.model.entities import DeadLetter, Delayed, Message, Payload, Receipt, Waiting
from custody.model.lanes import Priority
from custody.wire.settled import SettledOut


class PlacedOut(Struct, kw_only=True):
    """The place of a published message. A delayed one has `delay_id` and `deliver_at` instead of an offset.
    `duplicate`: it had been published before."""

    topic: str
    partition: int
    offset: int | UnsetType = UNSET
    delay_id: int | UnsetType = UNSET
    deliver_at: datetime | UnsetType = UNSET
    duplicate: bool

    @classmethod
    def of(cls, placed: Receipt | Delayed) -> Self:
        if isinstance(placed, Receipt):
            return cls(topic=placed.topic, partition=placed.partition, offset=placed.offset, duplicate=placed.duplicate)
        return cls(
            topic=placed.topic,
            partition=placed.partition,
            delay_id=placed.delay_id,
            deliver_at=placed.deliver_at,
            duplicate=placed.duplicate,
        )

    def value(self) -> Receipt | Delayed:
        if self.offset is not UNSET:
            return Receipt(self.topic, self.partition, self.offset, self.duplicate)
        assert self.delay_id is not UNSET
        assert self.deliver_at is not UNSET
        return Delayed(
            topic=self.topic,
            partition=self.partition,
            delay_id=self.delay_id,
            deliver_at=self.deliver_at,
            duplicate=self.duplicate,
        )


class ReceiptsOut(Struct):
    """The receipts of several messages, in their order."""

    receipts: list[PlacedOut]


class MessageFields(Struct, kw_only=True, omit_defaults=True):
    """The fields of every message."""

    topic: str
    partition: int
    offset: int
    key: str | None
    payload: Any = UNSET
    payload_base64: str | UnsetType = UNSET
    headers: dict[str, str]
    attempt: int
    published_at: datetime
    priority: Priority | None = None
    topic_uid: UUID | None = None


class MessageOut(MessageFields, kw_only=True):
    """A message. Its payload is in `payload`, or in `payload_base64` if it is bytes. `topic_uid` changes when a topic
    is deleted and created again: a consumer that records processed messages needs it in its key."""

    receipt: str | UnsetType = UNSET

    @classmethod
    def of(cls, message: Message, receipt: str | UnsetType = UNSET) -> Self:
        payload = message.payload
        bytes_given = isinstance(payload, bytes)
        return cls(
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
            topic_uid=message.topic_uid,
            receipt=receipt,
        )

    def value(self) -> Message:
        return Message(
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            key=self.key,
            payload=_payload(self),
            headers=self.headers,
            attempt=self.attempt,
            published_at=self.published_at,
            priority=self.priority,
            topic_uid=self.topic_uid,
        )


class DeadOut(MessageFields, kw_only=True):
    """A dead message; `held`: later messages of its key wait for it."""

    attempts: int
    reason: str
    last_error: str | None
    last_traceback: str | None
    errors: tuple[str, ...]
    died_at: datetime
    held: bool

    def value(self) -> DeadLetter:
        return DeadLetter(
            topic=self.topic,
            partition=self.partition,
            offset=self.offset,
            key=self.key,
            payload=_payload(self),
            headers=self.headers,
            attempt=self.attempt,
            published_at=self.published_at,
            priority=self.priority,
            topic_uid=self.topic_uid,
            attempts=self.attempts,
            reason=self.reason,
            last_error=self.last_error,
            last_traceback=self.last_traceback,
            errors=self.errors,
            died_at=self.died_at,
            held=self.held,
        )


class DelayedOut(Struct, kw_only=True):
    """A delayed message that is not due yet."""

    topic: str
    partition: int
    delay_id: int
    deliver_at: datetime
    delayed_at: datetime
    key: str | None
    payload: Any = UNSET
    payload_base64: str | UnsetType = UNSET
    headers: dict[str, str]
    duplicate: bool

    def value(self) -> Waiting:
        return Waiting(
            topic=self.topic,
            partition=self.partition,
            delay_id=self.delay_id,
            deliver_at=self.deliver_at,
            delayed_at=self.delayed_at,
            key=self.key,
            payload=_payload(self),
            headers=self.headers,
            duplicate=self.duplicate,
        )


def _payload(of: MessageFields | DelayedOut) -> Payload:
    return of.payload if of.payload_base64 is UNSET else base64.b64decode(of.payload_base64)


class LeaseOut(Struct, kw_only=True):
    """Messages under one lease. Without messages there is no lease, and `reason` is empty or busy.

    After a receive with `ack`, `settled` is what that did, or `lost` has the offsets that its lease no longer held.
    """

    lease_id: UUID | None
    deadline: datetime | None
    messages: list[MessageOut]
    reason: str | None = None
    detail: str | None = None
    settled: SettledOut | UnsetType = UNSET
    lost: list[int] | UnsetType = UNSET
