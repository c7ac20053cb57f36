"""Settling over HTTP, by lease id. A settle whose answer was lost is sent again, and then told from a lost lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn, TypeVar
from uuid import UUID

from custody.errors import CustodyError, DatabaseUnavailable, LeaseLost, NeedsDatabase
from custody.model import HistoryEntry, Settled
from custody.outcomes import Kind, Outcome
from custody.policy import Duration, seconds
from custody.remote.leases import Held, Leases
from custody.remote.transport import ATTEMPT, Method, Transport, Tries
from custody.remote.values import possible
from custody.settle import REMEDY, Settler, listed, storable
from custody.wire import fields
from custody.wire.answers import DeadlineOut, SettledOut
from custody.wire.queries import GroupQuery
from custody.wire.requests import AckIn, ExtendIn, LaterIn, NackIn, OutcomeIn, SettleIn

T = TypeVar("T")

SHORTEST = 1.0
"""So many seconds an answer is waited for at least."""

_RECORDED: dict[Kind, frozenset[str]] = {
    "ack": frozenset({"ack"}),
    "nack": frozenset({"nack", "dead"}),
    "dead": frozenset({"dead"}),
    "reject": frozenset({"dead"}),
    "later": frozenset({"later"}),
    "release": frozenset({"release"}),
}
"""What the journal says of a message that was settled so."""


def _in_time(timeout: Duration | None) -> float:
    """How long to wait for the answer to an extension: another server must be asked long before the lease is over."""
    return ATTEMPT if timeout is None else min(ATTEMPT, max(SHORTEST, seconds(timeout) / 6))


@dataclass(frozen=True, kw_only=True)
class RemoteSettler(Settler):
    """The settle verbs, each a request."""

    transport: Transport = field(repr=False)
    leases: Leases = field(repr=False)

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
            return self._send("/messages/ack", AckIn(lease_id=lease_id, offsets=list(outcomes)), lease_id, outcomes)
        given = [
            OutcomeIn(
                offset=offset,
                outcome=outcome.kind,
                error=storable(outcome.error),
                delay=fields.Duration.of(outcome.delay),
            )
            for offset, outcome in outcomes.items()
        ]
        return self._send("/messages/settle", SettleIn(lease_id=lease_id, outcomes=given), lease_id, outcomes)

    def _settle_some(self, lease_id: UUID, held: Mapping[int, Outcome], lost: list[int]) -> NoReturn:
        """Settles what can be held. The others are lost, and a request would be refused for them."""
        try:
            self.settle(lease_id, held)
        except LeaseLost as error:
            lost = sorted({*lost, *error.lost})
        raise LeaseLost(f"lease {lease_id} does not hold {listed(lost)}", REMEDY, lost=lost)

    def ack(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        if offsets is not None:
            return self.settle(lease_id, dict.fromkeys(offsets, Outcome("ack")))
        return self._send_whole("/messages/ack", AckIn(lease_id=lease_id), lease_id, Outcome("ack"))

    def _all(self, lease_id: UUID, offsets: Sequence[int] | None, outcome: Outcome) -> Settled:
        if offsets is not None:
            return self.settle(lease_id, dict.fromkeys(offsets, outcome))
        path, body = "/messages/release", AckIn(lease_id=lease_id)
        delay = fields.Duration.of(outcome.delay)
        if outcome.kind == "later":
            assert delay is not None
            path, body = "/messages/later", LaterIn(lease_id=lease_id, after=delay)
        elif outcome.kind != "release":
            path = "/messages/nack"
            body = NackIn(lease_id=lease_id, requeue=outcome.kind == "nack", error=storable(outcome.error), delay=delay)
        return self._send_whole(path, body, lease_id, outcome)

    def extend(self, lease_id: UUID, timeout: Duration | None = None, offset: int | None = None) -> datetime:
        if offset is not None and not possible(offset):
            raise LeaseLost(f"lease {lease_id} does not hold {listed([offset])}", REMEDY, lost=[offset])
        body = ExtendIn(lease_id=lease_id, offset=offset, timeout_seconds=fields.Timeout.of(timeout))
        return self._call(
            "POST", "/messages/extend-visibility", DeadlineOut, body=body, repeat=True, timeout=_in_time(timeout)
        ).deadline

    def _send_whole(self, path: str, body: AckIn, lease_id: UUID, outcome: Outcome) -> Settled:
        """One outcome for all that a lease holds, as far as it is known which messages these are."""
        held = self.leases.get(lease_id)
        outcomes = None if held is None else dict.fromkeys(held.offsets, outcome)
        return self._send(path, body, lease_id, outcomes, whole=True)

    def _send(
        self,
        path: str,
        body: AckIn | SettleIn,
        lease_id: UUID,
        outcomes: Mapping[int, Outcome] | None,
        *,
        whole: bool = False,
    ) -> Settled:
        """`outcomes` are what the request means, as far as it is known."""
        tries = Tries()
        try:
            answer = self._call("POST", path, SettledOut, body=body, repeat=True, tries=tries)
        except LeaseLost as lost:
            held = self.leases.get(lease_id)
            if tries.unknown or (held is not None and held.unsure):
                return self._found(lease_id, held, outcomes, lost)
            self.leases.settled(lease_id, outcomes if lost.lost else None)  # all of them are settled, or lost
            raise
        except BaseException as error:
            if tries.unknown or not isinstance(error, CustodyError):  # such as an interrupt in the middle of it
                self.leases.unsure(lease_id)
            raise
        self.leases.settled(lease_id, None if whole else [*(outcomes or ()), *answer.released])
        return answer.value()

    def _found(
        self, lease_id: UUID, held: Held | None, outcomes: Mapping[int, Outcome] | None, lost: LeaseLost
    ) -> Settled:
        """After an attempt without an answer: the journal tells what it did, or that the lease was lost indeed.

        What this client knew to be settled before is not held any more, whatever the journal says of it. The messages
        that left the lease with a stopped key are not looked up: `released` is empty.
        """
        if held is None or outcomes is None:
            raise DatabaseUnavailable(
                f"whether lease {lease_id} was settled is unknown: an attempt got no answer, and the lease is over",
                "The history of its messages tells (trace).",
            ) from lost
        missing: list[int] = []
        dead: list[int] = []
        for offset, outcome in outcomes.items():
            if lost.lost and offset not in lost.lost:
                continue  # settled by the last attempt
            kinds = self._recorded(held, offset, lease_id) if offset in held else frozenset()
            if not kinds & _RECORDED[outcome.kind]:
                missing.append(offset)
            elif "dead" in kinds:
                dead.append(offset)
        self.leases.settled(lease_id, outcomes)
        if missing:
            raise LeaseLost(f"lease {lease_id} does not hold {listed(missing)}", REMEDY, lost=missing) from lost
        return Settled(settled=len(outcomes), dead=tuple(dead))

    def _recorded(self, held: Held, offset: int, lease_id: UUID) -> frozenset[str]:
        """What the journal says that this lease did to a message."""
        path = f"/topics/{held.topic}/partitions/{held.partition}/messages/{offset}/history"
        found = self._call("GET", path, list[HistoryEntry], query=GroupQuery(group=held.group))
        return frozenset(entry.kind for entry in found if entry.lease_id == lease_id)

    def _call(self, method: Method, path: str, answer: type[T], **given: Any) -> T:
        return self.transport.call(method, path, answer, worker=self.worker or "-", **given)
