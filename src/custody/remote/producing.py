"""Producers with an identity, and their transactions, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import UUID

from msgspec import Struct

from custody.engine.producing import Producing
from custody.model import Delayed, OpenTransaction, Outgoing, Producer, Receipt
from custody.policy import Duration, seconds_or_none
from custody.producer import IdempotentProducer
from custody.remote.base import NO_DATABASE
from custody.remote.grouping import ChangedIn
from custody.remote.publishing import ReceiptsIn, RemotePublishing
from custody.remote.transport import Method, Transport
from custody.remote.values import PlacedIn, outgoing
from custody.tracing import traced_each
from custody.transactions import Transactions

T = TypeVar("T")


class ProducerIn(Struct):
    producer_id: str
    epoch: int
    last_sequence: int
    last_receipt: PlacedIn | None = None

    def value(self) -> Producer:
        return Producer(
            producer_id=self.producer_id,
            epoch=self.epoch,
            last_sequence=self.last_sequence,
            last_receipt=None if self.last_receipt is None else self.last_receipt.value(),
        )


class RemoteProducing(RemotePublishing, Producing):
    """Producers by their id."""

    def producer(self, producer_id: str) -> Producer:
        return self._call("GET", _path(producer_id), ProducerIn).value()

    def init_producer(self, producer_id: str) -> IdempotentProducer:
        """As the direct connection. Sent again after a lost answer, it takes over once more: the last epoch counts."""
        state = self._call("POST", "/producers/init", ProducerIn, body={"producer_id": producer_id}, repeat=True)
        return IdempotentProducer(state.value(), self.publish_many, self.publish_delayed, self.transactions)

    def forget_producer(self, producer_id: str, *, epoch: int | None = None) -> bool:
        return self._call("DELETE", _path(producer_id), ChangedIn, query={"epoch": epoch}).changed

    @property
    def transactions(self) -> Transactions:
        return RemoteTransactions(
            db=NO_DATABASE,
            layout_of=self._layout_of,
            forget=self._forget,
            committed=self.hint,
            worker=self.worker,
            transport=self._transport,
        )


def _path(producer_id: str) -> str:
    # dots too: a path of dots would be taken for a way up
    return f"/producers/{quote(producer_id, safe='').replace('.', '%2E')}"


class BegunIn(Struct):
    transaction_id: UUID
    expires_at: datetime


class AddedIn(Struct):
    messages: int


class AbortedIn(Struct):
    aborted: bool


@dataclass(frozen=True, kw_only=True)
class RemoteTransactions(Transactions):
    """The verbs of transactions, each a request."""

    transport: Transport = field(repr=False)

    def begin(self, producer_id: str, *, epoch: int | None, timeout: Duration | None) -> tuple[UUID, datetime]:
        """Sent again after a lost answer: the one that nobody knows of times out, and nothing is in it."""
        body = {"producer_id": producer_id, "epoch": epoch, "timeout": seconds_or_none(timeout)}
        begun = self._call("POST", "/transactions/begin", BegunIn, body=body, repeat=True)
        return begun.transaction_id, begun.expires_at

    def add(self, transaction_id: UUID, topic: str, messages: Sequence[Outgoing], *, first: int | None = None) -> int:
        return self.add_all(transaction_id, [(topic, message) for message in messages], first=first)

    def add_all(
        self, transaction_id: UUID, messages: Sequence[tuple[str, Outgoing]], *, first: int | None = None
    ) -> int:
        body = {
            "transaction_id": transaction_id,
            "messages": [{"topic": topic, **outgoing(message)} for topic, message in traced_each(messages)],
            "first": first,
        }
        return self._call("POST", "/messages", AddedIn, body=body, repeat=first is not None).messages

    def ack(self, transaction_id: UUID, lease_id: UUID, offsets: Sequence[int] | None = None) -> None:
        body = {
            "transaction_id": transaction_id,
            "lease_id": lease_id,
            "offsets": None if offsets is None else list(offsets),
        }
        self._call("POST", "/transactions/ack", type(None), body=body, repeat=True)

    def commit(self, transaction_id: UUID) -> list[Receipt | Delayed]:
        body = {"transaction_id": transaction_id}
        done = self._call("POST", "/transactions/commit", ReceiptsIn, body=body, repeat=True)
        return [one.value() for one in done.receipts]

    def abort(self, transaction_id: UUID, *, reason: str | None = None) -> bool:
        """As the direct connection. After a lost answer False may mean that the first attempt did it."""
        body = {"transaction_id": transaction_id, "reason": reason}
        return self._call("POST", "/transactions/abort", AbortedIn, body=body, repeat=True).aborted

    def open(self) -> list[OpenTransaction]:
        return self._call("GET", "/transactions", list[OpenTransaction])

    def _call(self, method: Method, path: str, answer: type[T], **given: Any) -> T:
        return self.transport.call(method, path, answer, worker=self.worker or "-", **given)
