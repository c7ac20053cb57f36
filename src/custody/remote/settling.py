"""Settling over HTTP, by lease id. A settle whose answer was lost is sent again: the server knows a repeat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn, TypeVar
from uuid import UUID

from custody.errors import LeaseLost, NeedsDatabase
from custody.model.entities import Settled
from custody.model.outcomes import Outcome
from custody.model.policy import Duration, seconds
from custody.remote.transport import ATTEMPT, Method, Transport
from custody.remote.values import possible
from custody.verbs.settle import Settler, lease_lost, storable
from custody.wire import fields
from custody.wire.answers import DeadlineOut, SettledOut
from custody.wire.requests import AckIn, ExtendIn, LaterIn, NackIn, OutcomeIn, SettleIn

T = TypeVar("T")

SHORTEST = 1.0
"""So many seconds an answer is waited for at least."""


def _in_time(timeout: Duration | None) -> float:
    """How long to wait for the answer to an extension: another server must be asked long before the lease is over."""
    return ATTEMPT if timeout is None else min(ATTEMPT, max(SHORTEST, seconds(timeout) / 6))


@dataclass(frozen=True, kw_only=True)
class RemoteSettler(Settler):
    """The settle verbs, each a request."""

    transport: Transport = field(repr=False)

    def __post_init__(self) -> None:
        if self.connection is not None:
            raise NeedsDatabase(
                "over HTTP a settle cannot join a transaction of yours",
                "Open Custody with the URL of that database, or record what is processed with custody.once.",
            )

    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome]) -> Settled:
        if not outcomes:
            return Settled(settled=0)
        held = {offset: outcome for offset, outcome in outcomes.items() if possible(offset)}
        if len(held) < len(outcomes):
            return self._settle_some(lease_id, held, [offset for offset in outcomes if offset not in held])
        if all(outcome.kind == "ack" for outcome in outcomes.values()):
            return self._send("/messages/ack", AckIn(lease_id=lease_id, offsets=list(outcomes)))
        given = [
            OutcomeIn(
                offset=offset,
                outcome=outcome.kind,
                error=storable(outcome.error),
                delay=fields.Duration.of(outcome.delay),
            )
            for offset, outcome in outcomes.items()
        ]
        return self._send("/messages/settle", SettleIn(lease_id=lease_id, outcomes=given))

    def _settle_some(self, lease_id: UUID, held: Mapping[int, Outcome], lost: list[int]) -> NoReturn:
        """Settles what can be held. The others are lost, and a request would be refused for them."""
        try:
            self.settle(lease_id, held)
        except LeaseLost as error:
            lost = sorted({*lost, *error.lost})
        raise lease_lost(lease_id, lost)

    def _whole(self, lease_id: UUID, outcome: Outcome) -> Settled:
        delay = fields.Duration.of(outcome.delay)
        if outcome.kind in ("ack", "release"):
            return self._send(f"/messages/{outcome.kind}", AckIn(lease_id=lease_id))
        if outcome.kind == "later":
            assert delay is not None
            return self._send("/messages/later", LaterIn(lease_id=lease_id, after=delay))
        body = NackIn(lease_id=lease_id, requeue=outcome.kind == "nack", error=storable(outcome.error), delay=delay)
        return self._send("/messages/nack", body)

    def extend(self, lease_id: UUID, timeout: Duration | None = None, offset: int | None = None) -> datetime:
        if offset is not None and not possible(offset):
            raise lease_lost(lease_id, [offset])
        body = ExtendIn(lease_id=lease_id, offset=offset, timeout_seconds=fields.Timeout.of(timeout))
        return self._call(
            "POST", "/messages/extend-visibility", DeadlineOut, body=body, repeat=True, timeout=_in_time(timeout)
        ).deadline

    def _send(self, path: str, body: AckIn | SettleIn) -> Settled:
        return self._call("POST", path, SettledOut, body=body, repeat=True).value()

    def _call(self, method: Method, path: str, answer: type[T], **given: Any) -> T:
        return self.transport.call(method, path, answer, worker=self.worker or "-", **given)
