"""Settle: what a worker says of the messages of its lease. Every verb is fenced: what is not held is LeaseLost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from custody.errors import LeaseLost
from custody.model.bounds import Bounded
from custody.model.entities import Settled
from custody.model.outcomes import Outcome
from custody.model.policy import Duration, interval, seconds_or_none
from custody.store.postgres import Connection, Database

LONGEST_ERROR = 8_000
"""So many characters of an error are kept; `custody.kept_error` has the same number."""
REMEDY = "Somebody else may have the message now: do not act on it. Use a longer visibility timeout, or extend in time."


@dataclass(frozen=True, kw_only=True)
class Settler(Bounded, ABC):
    """The settle verbs by lease id, for whoever has the ids: a lease, or another process."""

    worker: str | None = None
    connection: Connection | None = None

    @abstractmethod
    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome]) -> Settled:
        """Many outcomes at once, by offset: one statement, one commit.

        Settles what the lease still holds; if it no longer holds all of them, raises LeaseLost with the rest. What the
        same lease has settled so before is no loss. In a transaction of the caller it is all or nothing.
        """

    @abstractmethod
    def extend(self, lease_id: UUID, timeout: Duration | None = None, offset: int | None = None) -> datetime: ...

    @abstractmethod
    def _whole(self, lease_id: UUID, outcome: Outcome) -> Settled:
        """The same outcome for all of the lease that are not settled."""

    def ack(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        return self._all(lease_id, offsets, Outcome("ack"))

    def nack(
        self,
        lease_id: UUID,
        offsets: Sequence[int] | None = None,
        *,
        error: str | None = None,
        delay: Duration | None = None,
        requeue: bool = True,
    ) -> Settled:
        return self._all(lease_id, offsets, Outcome("nack" if requeue else "reject", error=error, delay=delay))

    def release(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        return self._all(lease_id, offsets, Outcome("release"))

    def later(self, lease_id: UUID, offsets: Sequence[int] | None = None, *, after: Duration) -> Settled:
        return self._all(lease_id, offsets, Outcome("later", delay=after))

    def _all(self, lease_id: UUID, offsets: Sequence[int] | None, outcome: Outcome) -> Settled:
        if offsets is not None:
            return self.settle(lease_id, dict.fromkeys(offsets, outcome))
        return self._whole(lease_id, outcome)


@dataclass(frozen=True, kw_only=True)
class DirectSettler(Settler):
    """The settle verbs in the database, or in a transaction of the caller's there."""

    db: Database
    clock: Callable[[], datetime] | None = None

    def _now(self) -> datetime | None:
        return None if self.clock is None else self.clock()

    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome]) -> Settled:
        if not outcomes:
            return Settled(settled=0)
        others = {offset: outcome for offset, outcome in outcomes.items() if outcome.kind != "ack"}
        return self._settled(
            "settle",
            lease_id,
            offsets=list(others),
            outcomes=[outcome.kind for outcome in others.values()],
            errors=[storable(outcome.error) for outcome in others.values()],
            delays=[seconds_or_none(outcome.delay) for outcome in others.values()],
            acked=offset_set(offset for offset, outcome in outcomes.items() if outcome.kind == "ack"),
        )

    def extend(self, lease_id: UUID, timeout: Duration | None = None, offset: int | None = None) -> datetime:
        deadline, lost = self.db.call(
            "extend",
            on=self.connection,
            lease_id=lease_id,
            timeout=interval(timeout),
            offset=offset,
            now=self._now(),
            exact=self.connection is not None,
        )[0]
        if deadline is None or lost:
            raise lease_lost(lease_id, lost)
        extended: datetime = deadline
        return extended

    def _whole(self, lease_id: UUID, outcome: Outcome) -> Settled:
        if outcome.kind == "ack":
            return self._settled("ack_lease", lease_id)
        return self._settled(
            "settle_lease",
            lease_id,
            outcome=outcome.kind,
            error=storable(outcome.error),
            delay=seconds_or_none(outcome.delay),
        )

    def _settled(self, function: str, lease_id: UUID, **arguments: Any) -> Settled:
        settled, lost, dead, released, already = self.db.call(
            function,
            on=self.connection,
            lease_id=lease_id,
            worker=self.worker,
            now=self._now(),
            exact=self.connection is not None,
            **arguments,
        )[0]
        if lost or not settled:
            raise lease_lost(lease_id, lost)
        return Settled(settled=settled, dead=tuple(dead), released=tuple(released), already=bool(already))


def lease_lost(lease_id: UUID | None, lost: Sequence[int]) -> LeaseLost:
    what = f"does not hold {listed(lost)}" if lost else "holds nothing any more"
    return LeaseLost(f"lease {lease_id} {what}", REMEDY, lost=lost)


def storable(error: object) -> str | None:
    """What PostgreSQL can keep of an error: it must never be the text of an error that loses an outcome."""
    if error is None:
        return None
    return str(error).replace("\0", "\ufffd").encode(errors="replace").decode()[:LONGEST_ERROR]


def listed(offsets: Sequence[int]) -> str:
    listed = ", ".join(map(str, offsets[:10])) + (" …" if len(offsets) > 10 else "")
    return f"offset{'s' if len(offsets) > 1 else ''} {listed}"


def offset_set(offsets: Iterable[int]) -> str:
    """A set of offsets as PostgreSQL writes a multirange."""
    ranges: list[list[int]] = []
    for offset in sorted(offsets):
        if ranges and ranges[-1][1] == offset:
            ranges[-1][1] = offset + 1
        else:
            ranges.append([offset, offset + 1])
    return "{" + ",".join(f"[{first},{last})" for first, last in ranges) + "}"
