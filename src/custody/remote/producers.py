"""Producers with an identity, and their transactions, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar
from uuid import UUID

from custody.model.entities import Outgoing
from custody.remote.derived import derive, request, special
from custody.remote.publishing import RemotePublishing
from custody.remote.transport import Method, Transport
from custody.remote.values import is_possible_offset, outgoing
from custody.tracing import traced_each
from custody.verbs.settle import lease_lost
from custody.verbs.transactions import Transactions
from custody.wire.answers import AddedOut
from custody.wire.requests import PublishIn
from custody.wire.verb import Verb

T = TypeVar("T")


class RemoteProducers(RemotePublishing):
    """Producers by their id."""

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
    """The verbs of transactions, as requests."""

    transport: Transport = field(repr=False)
    worker: str
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

    @special(Transactions.ack)
    def ack(self, verb: Verb, given: dict[str, Any]) -> None:
        lost = [offset for offset in given["offsets"] or () if not is_possible_offset(offset)]
        if lost:  # no lease can hold them, and they would have the whole request refused
            raise lease_lost(given["lease_id"], lost)
        request(self, verb, given)  # type: ignore[arg-type]  # it has what a client needs for that

    def _call(self, method: Method, path: str, answer: type[T], **given: Any) -> T:
        return self.transport.call(method, path, answer, worker=self.worker, **given)


derive(RemoteTransactions, Transactions)
