"""Answers without messages, and their conversion to values of the model."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Self
from uuid import UUID

import msgspec
from msgspec import UNSET, Struct, UnsetType

from custody.model.entities import Delayed, Producer, Receipt, Rewound
from custody.wire.messages import PlacedOut


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


class AddedOut(Struct):
    """How many messages the transaction holds now."""

    transaction_id: UUID
    messages: int


class DeadlineOut(Struct):
    deadline: datetime


class FlightOut(Struct):
    in_flight_count: int
    oldest_in_flight_age_seconds: float | None


class InFlightOut(Struct):
    topic: str
    partitions: dict[str, FlightOut]

    @classmethod
    def of(cls, found: dict[int, tuple[int, float | None]], *, topic: str) -> Self:
        return cls(topic, {str(partition): FlightOut(messages, age) for partition, (messages, age) in found.items()})

    def value(self) -> dict[int, tuple[int, float | None]]:
        return {
            int(partition): (one.in_flight_count, one.oldest_in_flight_age_seconds)
            for partition, one in self.partitions.items()
        }


class ProducerOut(Struct, kw_only=True):
    """`last_sequence` is -1 before the first message; `last_receipt` is that of the last one."""

    producer_id: str
    epoch: int
    last_sequence: int
    last_receipt: PlacedOut | None

    @classmethod
    def of(cls, producer: Producer) -> Self:
        last = producer.last_receipt
        return cls(
            producer_id=producer.producer_id,
            epoch=producer.epoch,
            last_sequence=producer.last_sequence,
            last_receipt=None if last is None else PlacedOut.of(last),
        )

    def value(self) -> Producer:
        last = self.last_receipt
        return Producer(
            producer_id=self.producer_id,
            epoch=self.epoch,
            last_sequence=self.last_sequence,
            last_receipt=None if last is None else last.value(),
        )


class BegunOut(Struct):
    transaction_id: UUID
    expires_at: datetime

    @classmethod
    def of(cls, begun: tuple[UUID, datetime]) -> Self:
        return cls(*begun)

    def value(self) -> tuple[UUID, datetime]:
        return self.transaction_id, self.expires_at


class CommittedOut(Struct):
    transaction_id: UUID
    receipts: list[PlacedOut]

    @classmethod
    def of(cls, receipts: Iterable[Receipt | Delayed], *, transaction_id: UUID) -> Self:
        return cls(transaction_id, [PlacedOut.of(receipt) for receipt in receipts])

    def value(self) -> list[Receipt | Delayed]:
        return [receipt.value() for receipt in self.receipts]


class AbortedOut(Struct):
    """`aborted`: false if it was already aborted."""

    transaction_id: UUID
    aborted: bool

    @classmethod
    def of(cls, aborted: bool, *, transaction_id: UUID) -> Self:
        return cls(transaction_id, aborted)

    def value(self) -> bool:
        return self.aborted


class PlaceOut(Struct):
    partition: int
    offset: int


class RedrivenOut(Struct):
    """The selected dead letters; with `dry_run` nothing has changed."""

    count: int
    dry_run: bool
    messages: list[PlaceOut]

    @classmethod
    def of(cls, found: list[tuple[int, int]], *, dry_run: bool) -> Self:
        return cls(len(found), dry_run, [PlaceOut(partition, offset) for partition, offset in found])

    def value(self) -> list[tuple[int, int]]:
        return [(one.partition, one.offset) for one in self.messages]


class RewoundOut(Struct):
    partition: int
    target: int
    messages: int


class RewindOut(Struct):
    dry_run: bool
    partitions: list[RewoundOut]

    @classmethod
    def of(cls, found: Iterable[Rewound], *, dry_run: bool) -> Self:
        return cls(dry_run, [RewoundOut(one.partition, one.target, one.messages) for one in found])

    def value(self) -> list[Rewound]:
        return [Rewound(partition=one.partition, target=one.target, messages=one.messages) for one in self.partitions]


class Single(Struct):
    """An answer with one field."""

    @classmethod
    def of(cls, found: Any) -> Self:
        return msgspec.convert({cls.__struct_fields__[0]: found}, cls)

    def value(self) -> Any:
        return getattr(self, self.__struct_fields__[0])


class ChangedOut(Single):
    """Whether there was anything to change."""

    changed: bool


class CountOut(Single):
    count: int


class DueOut(Single):
    """Seconds until the next timed event; null if there is none."""

    due: float | None


class WakeupOut(Struct):
    """`token` is sent with the next request. `woken`: something may have been published since the given token."""

    token: str
    woken: bool


class HealthOut(Struct):
    status: str
