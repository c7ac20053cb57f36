"""Settles in batches: all outcomes since the last settle go in one statement for each lease."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from uuid import UUID

from custody.elapsed import elapsed
from custody.errors import LeaseLost, Transient
from custody.model.entities import Message, Settled
from custody.model.outcomes import OUTCOMES, Outcome
from custody.vitals import Pulse, Vitals
from custody.worker.leases import HeldLease

logger = logging.getLogger(__name__)

RETRY_FIRST = 0.05
RETRY_MOST = 2.0

Finished = tuple[HeldLease, Message, Outcome]


class Settling:
    """A thread that settles finished messages. No outcome is dropped while its lease may still be alive."""

    def __init__(
        self,
        settle: Callable[[UUID, dict[int, Outcome]], Settled],
        finish: Callable[[HeldLease, dict[int, Outcome]], Settled],
        counts: Counter[str],
        vitals: Vitals,
        pulse: Pulse,
        settled: Callable[[HeldLease], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._settle = settle
        self._finish = finish
        self._counts = counts
        self._vitals, self._pulse = vitals, pulse
        self._settled = settled
        self._failed = failed
        self._finished: queue.SimpleQueue[Finished | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="custody-settling", daemon=True)
        self._thread.start()

    def add(self, lease: HeldLease, message: Message, outcome: Outcome) -> None:
        self._finished.put((lease, message, outcome))

    def close(self, timeout: float) -> None:
        """Returns when everything that was added is settled or lost, or after the timeout."""
        self._finished.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.error("not everything could be settled in time; the rest is delivered again when its lease expires")

    def _run(self) -> None:
        ended = False
        while not ended:
            self._pulse.beat(waits=math.inf)
            batch = [self._finished.get()]
            self._pulse.beat()
            while not self._finished.empty():
                batch.append(self._finished.get())
            ended = None in batch
            by_lease: dict[HeldLease, dict[int, Outcome]] = {}
            for finished in batch:
                if finished is not None:
                    lease, message, outcome = finished
                    by_lease.setdefault(lease, {})[message.offset] = outcome
            for lease, outcomes in by_lease.items():
                try:
                    self._settle_one(lease, outcomes)
                except Exception as error:  # this thread has no caller that could report it
                    self._failed(error)
                self._settled(lease)
        self._pulse.end()

    def _settle_one(self, lease: HeldLease, outcomes: dict[int, Outcome]) -> None:
        pause = RETRY_FIRST
        while True:
            self._pulse.beat()
            try:
                result = self._send(lease, outcomes)
            except LeaseLost as error:
                self._lost(lease, outcomes, error)
                break
            except Transient as error:
                if not lease.holds() and (_all_released(outcomes) or elapsed() > lease.expires + RETRY_MOST):
                    # a settle would be refused now; messages not started are delivered again after the expiry
                    self._lost(lease, outcomes, LeaseLost("the lease expired before the database was back"))
                    break
                logger.warning("retrying the settle in %.2f s: %s", pause, error)
                threading.Event().wait(pause)
                pause = min(pause * 2, RETRY_MOST)
                continue
            self._count(outcomes.values())
            self._counts["dead"] += len(result.dead)
            self._counts["released"] += len(result.released)
            lease.open.difference_update(outcomes)
            lease.open.difference_update(result.released)
            break

    def _count(self, outcomes: Iterable[Outcome]) -> None:
        """By what was said. Which messages are dead is for the answer to say: that depends on the policy, too."""
        for outcome in outcomes:
            self._vitals.outcomes[outcome.kind] += 1
            counted = OUTCOMES[outcome.kind].counted
            if counted != "dead":
                self._counts[counted] += 1

    def _send(self, lease: HeldLease, outcomes: dict[int, Outcome]) -> Settled:
        if lease.open <= outcomes.keys() | lease.behind and not _all_released(outcomes):
            return self._finish(lease, outcomes)
        return self._settle(lease.lease_id, outcomes)

    def _lost(self, lease: HeldLease, outcomes: dict[int, Outcome], error: LeaseLost) -> None:
        # the error also lists messages that were lost before
        gone = outcomes.keys() & error.lost if error.lost else set(outcomes)
        if gone >= outcomes.keys():
            lease.lost = True
        late = sum(offset in gone and outcome.kind != "release" for offset, outcome in outcomes.items())
        self._counts["lost"] += late
        self._count(outcome for offset, outcome in outcomes.items() if offset not in gone)
        lease.open.difference_update(outcomes)
        if late:
            logger.warning("%d outcomes came too late and were refused: %s", late, error)
        if len(gone) > late:
            logger.warning(
                "%d messages were not started, because their lease may have expired. "
                "If the database was available all the time, use a longer visibility timeout",
                len(gone) - late,
            )


def _all_released(outcomes: dict[int, Outcome]) -> bool:
    return all(outcome.kind == "release" for outcome in outcomes.values())
