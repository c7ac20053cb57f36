"""Settle: reports the outcomes of the messages of a lease. Every verb is fenced: LeaseLost names messages that the
lease no longer holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
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
from custody.wire.verb import composed

LONGEST_ERROR = 8_000
"""Characters of an error that are stored; `custody.kept_error` has the same number."""
REMEDY = "Another worker may have the message: do not act on it. Use a longer visibility timeout, or extend earlier."


class SettleVerbs(Bounded):
    """The settle verbs by lease id, for these offsets or for all messages of the lease that are not settled."""

    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome] | Outcome) -> Settled:
        """Settles messages, each with its own outcome, by offset, or all that are not settled with one.

        It is one statement and one commit. It settles what the lease still holds; if it no longer holds all of them,
        it raises LeaseLost with the rest. A repeat of the same settle is a success. In a transaction of the caller it
        is all or nothing.
        """
        raise NotImplementedError

    @composed
    def ack(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        """Marks messages as done."""
        return self.settle(lease_id, for_each(offsets, Outcome("ack")))

    @composed
    def nack(
        self,
        lease_id: UUID,
        offsets: Sequence[int] | None = None,
        *,
        error: str | None = None,
        delay: Duration | None = None,
        requeue: bool = True,
    ) -> Settled:
        """Marks messages as failed: the policy decides on a retry. With `requeue=False` they are dead at once."""
        outcome = Outcome("nack" if requeue else "reject", error=error, delay=delay)
        return self.settle(lease_id, for_each(offsets, outcome))

    @composed
    def release(self, lease_id: UUID, offsets: Sequence[int] | None = None) -> Settled:
        """Gives messages back: they are ready at once, and the delivery does not count as an attempt."""
        return self.settle(lease_id, for_each(offsets, Outcome("release")))

    @composed
    def later(self, lease_id: UUID, offsets: Sequence[int] | None = None, *, after: Duration) -> Settled:
        """Postpones messages: they are ready again after that time, and the delivery does not count as an attempt."""
        return self.settle(lease_id, for_each(offsets, Outcome("later", delay=after)))


def for_each(offsets: Sequence[int] | None, outcome: Outcome) -> dict[int, Outcome] | Outcome:
    """One outcome for these offsets; None means all of the lease that are not settled."""
    return outcome if offsets is None else dict.fromkeys(offsets, outcome)


@dataclass(frozen=True, kw_only=True)
class Settler(SettleVerbs, ABC):
    """The settle verbs in the database, or over HTTP. Used by `Lease`."""

    connection: Connection | None = None

    @abstractmethod
    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome] | Outcome) -> Settled: ...

    @abstractmethod
    def extend(self, lease_id: UUID, timeout: Duration | None = None, offset: int | None = None) -> datetime: ...


@dataclass(frozen=True, kw_only=True)
class DirectSettler(Settler):
    """The settle verbs as calls of SQL functions, optionally in the caller's transaction."""

    db: Database

    def settle(self, lease_id: UUID, outcomes: Mapping[int, Outcome] | Outcome) -> Settled:
        if isinstance(outcomes, Outcome):
            return self._whole(lease_id, outcomes)
        if not outcomes:
            return Settled(settled=0)
        return self._settled("settle", lease_id, **arguments_of(outcomes))

    def extend(self, lease_id: UUID, timeout: Duration | None = None, offset: int | None = None) -> datetime:
        deadline, lost = self.db.call(
            "extend",
            on=self.connection,
            lease_id=lease_id,
            timeout=interval(timeout),
            offset=offset,
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
            traceback=storable(outcome.traceback),
            delay=seconds_or_none(outcome.delay),
        )

    def _settled(self, function: str, lease_id: UUID, **arguments: Any) -> Settled:
        row = self.db.call(
            function,
            on=self.connection,
            lease_id=lease_id,
            exact=self.connection is not None,
            **arguments,
        )[0]
        settled, lost = answer_of(lease_id, *row)
        if lost is not None:
            raise lost
        return settled


def arguments_of(outcomes: Mapping[int, Outcome]) -> dict[str, Any]:
    """The outcomes of messages as arguments of the SQL functions."""
    others = {offset: outcome for offset, outcome in outcomes.items() if outcome.kind != "ack"}
    return {
        "offsets": list(others),
        "outcomes": [outcome.kind for outcome in others.values()],
        "errors": [storable(outcome.error) for outcome in others.values()],
        "tracebacks": [storable(outcome.traceback) for outcome in others.values()],
        "delays": [seconds_or_none(outcome.delay) for outcome in others.values()],
        "acked": offset_set(offset for offset in outcomes if offset not in others),
    }


def answer_of(
    lease_id: UUID,
    settled: int,
    lost: Sequence[int],
    dead: Sequence[int],
    released: Sequence[int],
    already: Sequence[int],
) -> tuple[Settled, LeaseLost | None]:
    """The answer to a settle: what was settled, and an error if something was lost."""
    answer = Settled(settled=settled, dead=tuple(dead), released=tuple(released), already=bool(already))
    return answer, lease_lost(lease_id, lost) if lost or not settled else None


def lease_lost(lease_id: UUID | None, lost: Sequence[int]) -> LeaseLost:
    what = f"does not hold {listed(lost)}" if lost else "holds nothing any more"
    return LeaseLost(f"lease {lease_id} {what}", REMEDY, lost=lost)


def storable(error: object) -> str | None:
    """The text of an error as PostgreSQL can store it, so that an outcome is never lost because of its text."""
    if error is None:
        return None
    return str(error).replace("\0", "\ufffd").encode(errors="replace").decode()[:LONGEST_ERROR]


def listed(offsets: Sequence[int]) -> str:
    listed = ", ".join(map(str, offsets[:10])) + (" …" if len(offsets) > 10 else "")
    return f"offset{'s' if len(offsets) > 1 else ''} {listed}"


def offset_set(offsets: Iterable[int]) -> str:
    """A set of offsets as the text of a multirange."""
    ranges: list[list[int]] = []
    for offset in sorted(offsets):
        if ranges and ranges[-1][1] == offset:
            ranges[-1][1] = offset + 1
        else:
            ranges.append([offset, offset + 1])
    return "{" + ",".join(f"[{first},{last})" for first, last in ranges) + "}"
