"""Settling over HTTP, by lease id. A settle whose answer was lost is repeated: the server recognises repeats."""

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
from custody.remote.values import is_possible_offset
from custody.verbs.settle import Settler, lease_lost, storable
from custody.wire import fields
from custody.wire.answers import DeadlineOut
from custody.wire.requests import AckIn, ExtendIn, OffsetOutcomeIn, OutcomeIn, SettleIn
from custody.wire.settled import SettledOut

T = TypeVar("T")
OutcomeT = TypeVar("OutcomeT", bound=OutcomeIn)

SHORTEST = 1.0
"""Shortest timeout of an extension, in seconds."""


def _in_time(timeout: Duration | None) -> float:
    """Timeout of one attempt to extend: there must be time to try another server before the lease expires."""
    return ATTEMPT if timeout is None else min(ATTEMPT, max(SHORTEST, seconds(timeout) / 6))


def _sent(shape: type[OutcomeT], outcome: Outcome, **more: int) -> OutcomeT:
    delay = fields.Duration.of(outcome.delay)
    error, traceback = storable(outcome.error), storable(outcome.traceback)
    return shape(outcome=outcome.kind, error=error, delay=delay, traceback=traceback, **more)


@dataclass(frozen=True, kw_only=True)
class RemoteSettler(Settler):
    """The settle verbs, as requests."""

    transport: Transport = field(repr=False)
    worker: str = "-"

    def __post_init__(self) -> None:
        if self.connection is not None:
            raise NeedsDatabase(
                "over HTTP a settle cannot be part of your transaction",
                "Open Custody with the URL of that database, or record processed messages with custody.once.",
            )

    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome] | Outcome) -> Settled:
        if isinstance(outcomes, Outcome):
            if outcomes.kind == "ack":
                return self._send("/messages/ack", AckIn(lease_id=lease_id))
            return self._send("/messages/settle", SettleIn(lease_id=lease_id, all=_sent(OutcomeIn, outcomes)))
        if not outcomes:
            return Settled(settled=0)
        held = {offset: outcome for offset, outcome in outcomes.items() if is_possible_offset(offset)}
        if len(held) < len(outcomes):
            return self._settle_some(lease_id, held, [offset for offset in outcomes if offset not in held])
        if all(outcome.kind == "ack" for outcome in outcomes.values()):
            return self._send("/messages/ack", AckIn(lease_id=lease_id, offsets=list(outcomes)))
        given = [_sent(OffsetOutcomeIn, outcome, offset=offset) for offset, outcome in outcomes.items()]
        return self._send("/messages/settle", SettleIn(lease_id=lease_id, outcomes=given))

    def _settle_some(self, lease_id: UUID, held: Mapping[int, Outcome], lost: list[int]) -> NoReturn:
        """Settles the possible offsets. The others are lost, and would have the whole request refused."""
        try:
            self.settle(lease_id, held)
        except LeaseLost as error:
            lost = sorted({*lost, *error.lost})
        raise lease_lost(lease_id, lost)

    def extend(self, lease_id: UUID, timeout: Duration | None = None, offset: int | None = None) -> datetime:
        if offset is not None and not is_possible_offset(offset):
            raise lease_lost(lease_id, [offset])
        body = ExtendIn(lease_id=lease_id, offset=offset, timeout_seconds=fields.Timeout.of(timeout))
        return self._call(
            "POST", "/messages/extend-visibility", DeadlineOut, body=body, repeat=True, timeout=_in_time(timeout)
        ).deadline

    def _send(self, path: str, body: AckIn | SettleIn) -> Settled:
        return self._call("POST", path, SettledOut, body=body, repeat=True).value()

    def _call(self, method: Method, path: str, answer: type[T], **given: Any) -> T:
        return self.transport.call(method, path, answer, worker=self.worker, **given)
