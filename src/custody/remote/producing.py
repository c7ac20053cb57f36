"""Producers with an identity, and their transactions, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from custody.model.entities import Outgoing
from custody.remote.derived import derive
from custody.remote.publishing import RemotePublishing
from custody.remote.transport import Method, Transport
from custody.remote.values import outgoing
from custody.tracing import traced_each
from custody.verbs.producer import IdempotentProducer
from custody.verbs.transactions import Transactions
from custody.wire.answers import AddedOut, ProducerOut
from custody.wire.requests import ProducerIn, PublishIn, TransactionAckIn

T = TypeVar("T")


class RemoteProducing(RemotePublishing):
    """Producers by their id."""

    def init_producer(self, producer_id: str) -> IdempotentProducer:
        """As the direct connection. Sent again after a lost answer, it takes over once more: the last epoch counts."""
        body = ProducerIn(producer_id=producer_id)
        state = self._call("POST", "/producers/init", ProducerOut, body=body, repeat=True)
        return IdempotentProducer(state.value(), self.publish_many, self.publish_delayed, self.transactions)

    @property
    def transactions(self) -> Transactions:
        return RemoteTransactions(  # type: ignore[abstract]  # the verbs that are declared are derived below
            layout_of=self._layout_of,
            forget=self._forget,
            worker=self.worker,
            transport=self._transport,
        )


@dataclass(frozen=True, kw_only=True)
class RemoteTransactions(Transactions):
    """The verbs of transactions, each a request."""

    transport: Transport = field(repr=False)
    _patience: ClassVar[dict[str, dict[str, float]]] = {}

    def add_all(
        self, transaction_id: UUID, messages: Sequence[tuple[str, Outgoing]], *, first: int | None = None
    ) -> int:
        body = PublishIn(
            transaction_id=transaction_id,
            messages=[outgoing(message, topic) for topic, message in traced_each(messages)],
            first=first,
        )
        return self._call("POST", "/messages", AddedOut, body=body, repeat=first is not None).messages

    def ack(self, transaction_id: UUID, lease_id: UUID, offsets: Sequence[int] | None = None) -> None:
        body = TransactionAckIn(
            transaction_id=transaction_id, lease_id=lease_id, offsets=None if offsets is None else list(offsets)
        )
        self._call("POST", "/transactions/ack", type(None), body=body, repeat=True)

    def _call(self, method: Method, path: str, answer: type[T], **given: Any) -> T:
        return self.transport.call(method, path, answer, worker=self.worker or "-", **given)


derive(RemoteTransactions, Transactions, {"add", "require_places"})
