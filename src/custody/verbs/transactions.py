"""Transactions of a producer: messages to several topics, and acks, that become visible together or not at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Self
from uuid import UUID

from custody.errors import CustodyError, DatabaseUnavailable
from custody.model.bounds import Bounded
from custody.model.codec import Encoded, encode_message
from custody.model.entities import Delayed, OpenTransaction, Outgoing, Payload, Receipt, batch_of
from custody.model.lanes import Priority
from custody.model.placement import PLACED_WRONGLY, Layout, place
from custody.model.policy import Duration
from custody.tracing import traced
from custody.verbs.claim import Lease, Which, offsets_of
from custody.verbs.delays import require_time
from custody.wire.answers import AbortedOut, BegunOut, CommittedOut
from custody.wire.fields import GivenTimeout, Name, Offset, Positive, Reason
from custody.wire.verb import composed, verb

FLUSH_AT = 500
"""Messages that are collected before they are sent: they are not visible before the commit anyway."""


@dataclass(frozen=True, kw_only=True)
class Transactions(Bounded, ABC):
    """The verbs of transactions by id. Used by `Transaction`, and by other processes that know the id."""

    layout_of: Callable[[str], Layout]
    forget: Callable[[str], object]

    @verb(
        "POST",
        "/transactions/begin",
        tag="producers",
        right="produce",
        answer=BegunOut,
        repeat=True,  # a transaction whose id was lost times out empty
        thread="quick",
        example={"producer_id": "order-service-1"},
    )
    @abstractmethod
    def begin(
        self, producer_id: Name, *, epoch: Positive | None = None, timeout: GivenTimeout | None = None
    ) -> tuple[UUID, datetime]:
        """Begins a transaction. Returns its id and the time of its end.

        It is aborted after its timeout (default: 60 s), and when a newer instance of the producer takes over. The epoch
        is by default the current one of the producer.
        """

    @abstractmethod
    def add_all(
        self, transaction_id: UUID, messages: Sequence[tuple[str, Outgoing]], *, first: int | None = None
    ) -> int:
        """Adds messages of several topics, all or none, in this order. Returns the number of messages in the
        transaction.

        `first` is the number of the first one, so that a repeat adds nothing.
        """

    @verb(
        "POST",
        "/transactions/ack",
        tag="producers",
        right="consume",
        answer=None,
        repeat=True,
        operation="ack_in_transaction",
        example={
            "transaction_id": "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e",
            "lease_id": "0b6f5a52-8a3e-4a5b-9a54-5d1f3d8f0c11",
            "offsets": [42, 43],
        },
    )
    @abstractmethod
    def ack(self, transaction_id: UUID, lease_id: UUID, offsets: Sequence[Offset] | None = None) -> None:
        """Acks these offsets of a lease, or all that are not settled, with the commit. If they are lost, the commit is
        refused."""

    @verb(
        "POST",
        "/transactions/commit",
        tag="producers",
        right="produce",
        answer=CommittedOut,
        repeat=True,
        example={"transaction_id": "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e"},
    )
    @abstractmethod
    def commit(self, transaction_id: UUID) -> list[Receipt | Delayed]:
        """Makes all of it visible at once. A repeat returns the same receipts."""

    @verb(
        "POST",
        "/transactions/abort",
        tag="producers",
        right="produce",
        answer=AbortedOut,
        repeat=True,  # False may then mean that the first attempt did it
        thread="quick",
        example={"transaction_id": "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e"},
    )
    @abstractmethod
    def abort(self, transaction_id: UUID, *, reason: Reason = None) -> bool:
        """Aborts a transaction: none of its messages and acks take effect.

        False if it was already aborted.
        """

    @verb(
        "GET",
        "/transactions",
        tag="producers",
        right="admin",
        everywhere=True,
        answer=list[OpenTransaction],
        operation="open_transactions",
        thread="read",
    )
    @abstractmethod
    def open(self) -> list[OpenTransaction]:
        """The open transactions, the oldest first. Each times out by itself."""

    @composed
    def require_places(self, topic: str, messages: Sequence[Outgoing]) -> None:
        """Refuses a topic that does not exist, and messages with an invalid partition or priority."""
        layout = self.layout_of(topic)
        named = [message for message in messages if message.partition is not None or message.priority is not None]
        try:
            place(named, layout)
        except PLACED_WRONGLY:
            self.forget(topic)
            place(named, self.layout_of(topic))

    @composed
    def add(self, transaction_id: UUID, topic: str, messages: Sequence[Outgoing], *, first: int | None = None) -> int:
        """`add_all` for one topic."""
        return self.add_all(transaction_id, [(topic, message) for message in messages], first=first)


def encoded(message: Outgoing) -> Encoded:
    if message.delayed:
        require_time(message)
    return encode_message(message)


class Transaction:
    """Publishes to any topics and acks of one producer, all or nothing.

    As a context manager it commits at the end of the block, and aborts if the block raises. `receipts` are set by the
    commit, in the order of publishing. Use it from one thread.
    """

    def __init__(self, verbs: Transactions, producer_id: str, epoch: int, timeout: Duration | None) -> None:
        self._verbs = verbs
        self.transaction_id, self.expires_at = verbs.begin(producer_id, epoch=epoch, timeout=timeout)
        self.receipts: list[Receipt | Delayed] = []
        self._pending: list[tuple[str, Outgoing]] = []
        self._added = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.commit()
            return
        try:
            self.abort(reason=f"{kind.__name__ if kind else 'error'}: {error}"[:500])
        except CustodyError as failed:  # it will time out; the first error is the one to raise
            error.add_note(f"the transaction could not be aborted either: {failed}")

    def publish(
        self,
        topic: str,
        payload: Payload,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        priority: Priority | None = None,
        routing_key: str | None = None,
        delay: Duration | None = None,
        deliver_at: datetime | None = None,
        allow_split: bool = False,
    ) -> None:
        """Adds one message. Invalid input is refused now; its receipt is known after the commit."""
        message = Outgoing(
            payload,
            key=key,
            headers=headers,
            partition=partition,
            priority=priority,
            routing_key=routing_key,
            delay=delay,
            deliver_at=deliver_at,
            allow_split=allow_split,
        )
        self.publish_many(topic, [message])

    def publish_many(self, topic: str, messages: Iterable[Outgoing | Payload]) -> None:
        # traced now, because the span may have ended when they are sent
        batch = traced(batch_of(messages))
        for message in batch:
            encoded(message)
        self._verbs.require_places(topic, batch)
        self._pending += [(topic, message) for message in batch]
        if len(self._pending) >= FLUSH_AT:
            self._flush()

    def ack(self, lease: Lease, *messages: Which) -> None:
        """Acks these messages of the lease, or all that are not settled, with the commit: all of them, or LeaseLost."""
        self._verbs.ack(self.transaction_id, lease.lease_id, offsets_of(messages))

    def commit(self) -> list[Receipt | Delayed]:
        """Makes everything visible at once. After a lost connection it is tried once more. It can be called again: a
        repeat returns the same receipts."""
        try:
            self._flush()
            self.receipts = self._verbs.commit(self.transaction_id)
        except DatabaseUnavailable:
            self._flush()
            self.receipts = self._verbs.commit(self.transaction_id)
        return self.receipts

    def abort(self, *, reason: str | None = None) -> None:
        """Drops everything. Does nothing if it was already aborted."""
        self._pending = []
        self._verbs.abort(self.transaction_id, reason=reason)

    def _flush(self) -> None:
        while self._pending:
            topic = self._pending[0][0]
            count = next((n for n, (other, _) in enumerate(self._pending) if other != topic), len(self._pending))
            batch = [message for _, message in self._pending[:count]]
            # numbered, so that a repeat after a lost answer adds nothing
            self._added = self._verbs.add(self.transaction_id, topic, batch, first=self._added)
            del self._pending[:count]
