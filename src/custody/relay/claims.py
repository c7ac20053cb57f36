"""A relay's calls of the outbox: claim a batch, extend it, settle its results while it is held."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from custody.elapsed import elapsed, holds_until
from custody.errors import CustodyError, Transient
from custody.model.policy import Backoff
from custody.relay.batch import Batch, Result
from custody.relay.outages import delay
from custody.relay.publisher import ClaimedEvent
from custody.relay.registry import Registry
from custody.store.postgres import Database
from custody.verbs.settle import storable
from custody.vitals import Durations

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """The result of a claim: a batch, if anything is due; the id to continue after (None at the end); and whether an
    event was held back that has to be tried alone."""

    batch: Batch | None
    scanned: int | None
    held_back: bool


@dataclass(frozen=True, kw_only=True)
class OutboxClaims:
    """The claims of one relay, with its name and settings. `counts` has the number of events by outcome."""

    db: Database
    registry: Registry
    relay: str
    lease: float
    max_attempts: int
    retry_for: timedelta
    max_age: timedelta | None
    backoff: Backoff
    hold: bool
    stopping: Callable[[], bool]
    suspects: Container[int]
    lone: Container[int]
    took: Durations
    counts: Counter[str] = field(default_factory=Counter)

    def claim(
        self, most: int, *, after: int, alone: bool, excepted: Sequence[str] = (), only: Sequence[str] | None = None
    ) -> Found:
        """Claims due events after an id. `alone`: the relay has nothing else in flight.

        `only`: destinations to probe because they are down. Then only `lone` events are suspected to be the cause."""
        sent = elapsed()
        (*_, scanned, held_back), *rows = self.db.call(
            "outbox_claim",
            relay=self.relay,
            max=most,
            lease=timedelta(seconds=self.lease),
            max_attempts=self.max_attempts,
            max_age=self.max_age,
            names=self.registry.names,
            excepted=list(excepted) or None,
            only=None if only is None else list(only),
            hold=self.hold,
            after=after,
            alone=alone,
        )
        if not rows:
            return Found(None, scanned, held_back is not None)
        batch = Batch(
            rows[0][12],
            [_claimed(row) for row in rows],
            self.registry,
            deadline=holds_until(sent, self.lease),
            stopping=self.stopping,
            suspects=self.suspects if only is None else self.lone,
            took=self.took,
        )
        batch.alone = rows[0][15] == 1
        return Found(batch, scanned, held_back is not None)

    def extend(self, batch: Batch) -> None:
        """Extends the claim of unsettled events. Events that it no longer holds are not begun. If it holds none, the
        deadline stays."""
        sent = elapsed()
        lease = timedelta(seconds=self.lease)
        try:
            rows = self.db.call("outbox_extend", claim=batch.claim, ids=batch.unsettled, lease=lease)
        except Transient as error:
            logger.warning("the claim could not be extended: %s", error)
            return
        batch.held = {row[0] for row in rows}
        if batch.held:
            batch.deadline = holds_until(sent, self.lease)

    def settle(self, batch: Batch, results: Sequence[Result]) -> list[Result]:
        """Settles results. Events that the claim no longer holds are lost: other relays have them. Returns results
        whose events are locked by another transaction: they have to be settled later."""
        held = [result for result in results if result.outcome != "lost"]
        self.counts["lost"] += len(results) - len(held)
        if not held:
            return []
        try:
            states = self._settled(batch, held)
        except Transient:
            raise
        except CustodyError as error:
            if len(held) > 1:
                return [locked for result in held for locked in self.settle(batch, [result])]
            logger.error("event %s cannot be settled: %s", held[0].event.event_id, error)
            self.counts["lost"] += 1
            return []
        for result in held:
            self._count(result, states.get(result.event.id))
        return [result for result in held if states.get(result.event.id) == "CLAIMED"]

    def _settled(self, batch: Batch, held: Sequence[Result]) -> dict[int, str]:
        """Settles, and returns the new states by id."""
        failed = any(result.outcome != "published" for result in held)
        rows = self.db.call(
            "outbox_settle",
            claim=batch.claim,
            ids=[result.event.id for result in held],
            outcomes=[_written(result) for result in held],
            errors=[storable(result.error) for result in held] if failed else None,
            delays=[self._delay(result) for result in held] if failed else None,
            max_attempts=self.max_attempts,
            max_age=self.max_age,
            retry_for=self.retry_for,
        )
        return dict(rows)

    def _count(self, result: Result, state: str | None) -> None:
        if state is None:
            self.counts["lost"] += 1
            logger.warning("event %s: the claim was lost before it was settled", result.event.event_id)
        elif state == "DEAD":
            self.counts["dead"] += 1
            logger.error("event %s is dead: %s", result.event.event_id, result.error)
        elif state != "CLAIMED":
            written = _written(result)
            self.counts["failed" if written == "unavailable" else written] += 1

    def _delay(self, result: Result) -> float | None:
        if result.outcome != "failed":
            return None
        return max(delay(self.backoff, result.event.attempts + 1), result.retry_after or 0)


def _written(result: Result) -> str:
    """The outcome for `outbox_settle`."""
    if result.outcome in ("unavailable", "busy"):
        return "unavailable" if result.tried else "released"
    return result.outcome


def _claimed(row: tuple[Any, ...]) -> ClaimedEvent:
    """An event from a row of `custody.outbox_claim`."""
    return ClaimedEvent(
        id=row[0],
        event_id=row[1],
        event_type=row[2],
        destination=row[3],
        kind=row[4] if isinstance(row[4], str) else row[4].decode(),
        data=row[5],
        headers=row[6] or {},
        partition_key=row[7],
        ordering_key=row[8],
        created_at=row[9],
        attempts=row[10],
        replays=row[11],
    )
