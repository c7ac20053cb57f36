"""The batches that a relay has in flight: starts them, settles their results as they come, and extends their claims.

A batch waits only for its own events, so that a slow destination does not delay others. The claim keeps the order of
keys: for the outbox, several batches are like several relays.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence

from custody.elapsed import elapsed
from custody.errors import Transient
from custody.outbox.events import without_secrets
from custody.relay.batch import Batch, Heard, Result
from custody.relay.claims import OutboxClaims
from custody.relay.outages import Outages
from custody.relay.threads import Threads

logger = logging.getLogger(__name__)

QUICK = 0.5  # seconds: a batch that takes longer is slow, and its results are settled before its end


class InFlightBatches:
    """Used only by the relay's own thread, except for `wake`."""

    def __init__(self, claims: OutboxClaims, outages: Outages, threads: Threads, *, most: int) -> None:
        """`most`: the events of a full batch."""
        self._claims, self._outages, self._threads, self._most = claims, outages, threads, most
        self._every = min(QUICK, claims.lease / 4)
        self._batches: list[Batch] = []
        self._heard: Heard = queue.SimpleQueue()
        self._quick = False
        self.held_back = False  # an event that has to be tried alone waits until nothing is in flight

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def events(self) -> int:
        """Events that are not settled. May be read by any thread."""
        return sum(len(batch.waiting) + len(batch.unsettled_results) for batch in tuple(self._batches))

    @property
    def excepted(self) -> list[str]:
        """Destinations that get no batch now: those that are down, and slow ones whose threads are all busy."""
        fresh = self._fresh()
        slow = {
            event.destination
            for batch in self._batches
            if batch not in fresh
            for event in batch.events
            if event.id in batch.waiting
        }
        return [*self._outages.down, *slow.intersection(self._threads.full())]

    @property
    def closed(self) -> bool:
        """Whether nothing may be begun, because an event is tried alone, or will be when the batches in flight have
        ended. One that takes longer than a lease is no longer alone: it would delay all destinations."""
        if self.held_back and self._batches:
            return True
        now = time.monotonic()
        return any(batch.alone and now - batch.began < self._claims.lease for batch in self._batches)

    @property
    def due_probes(self) -> list[str]:
        """Destinations that are down and due for a probe, with one event each; not too many at a time."""
        probed = {batch.probe for batch in self._batches if batch.probe is not None}
        due = [destination for destination in self._outages.due() if destination not in probed]
        return due[: max(0, self._threads.share - len(probed))]

    @property
    def ahead(self) -> bool:
        """Whether there is a batch that is not slow (yet)."""
        return any(self._fresh())

    @property
    def room(self) -> bool:
        """Whether another batch may be begun: always beside slow ones; beside a quick one only if that is full.

        Two full and quick batches are in flight, so that both databases work at the same time. If a batch is not full,
        nothing more is due; a third quick batch would only wait here while another relay could have it.
        """
        if self.closed:
            return False
        fresh = self._fresh()
        if not fresh:
            return not self._batches or self._threads.idle
        return self._quick and len(fresh) == 1 and len(fresh[0].events) >= self._most

    def begin(self, batch: Batch, *, probe: str | None = None) -> None:
        batch.probe, batch.settle_at = probe, batch.began + self._every
        self._batches.append(batch)
        batch.start(self._threads, self._heard)

    def wake(self) -> None:
        """Ends the wait in `attend`. May be called by any thread, and in a signal handler."""
        self._heard.put(None)

    def attend(self, seconds: float) -> bool:
        """Waits at most `seconds`, or until a batch has all of its results. Then settles and extends every batch. True
        if one has ended."""
        until = time.monotonic() + (min(seconds, self._every) if self._batches else seconds)
        while True:
            try:
                heard = self._heard.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if heard is None:
                break
            batch, results = heard
            self._hear(batch, results)
            if not batch.waiting:
                break
        ended = [batch for batch in self._batches if self._see_to(batch)]
        for batch in ended:
            self._batches.remove(batch)
        return bool(ended)

    def settle_known_results(self) -> None:
        """Settles the known results once, at the end of the relay, after its threads have ended."""
        while not self._heard.empty():
            heard = self._heard.get()
            if heard is not None:
                self._hear(*heard)
        for batch in self._batches:
            self._claims.settle(batch, batch.unsettled_results)

    def _fresh(self) -> list[Batch]:
        """The batches, except probes, that are not slow (yet)."""
        now = time.monotonic()
        return [b for b in self._batches if b.probe is None and now - b.began < QUICK]

    def _hear(self, batch: Batch, results: Sequence[Result]) -> None:
        batch.hear(results)
        event, outcome, error, retry_after, _, answered = results[0]
        probe = batch.probe is not None
        if outcome in ("unavailable", "busy"):
            if probe or event.destination not in self._outages.down:  # an earlier batch may have found that already
                wait = self._outages.failed(event.destination, retry_after)
                logger.warning("%s is down, tried again in %.1f s: %s", without_secrets(event.destination), wait, error)
            elif retry_after is not None:
                self._outages.postpone(event.destination, retry_after)
            if len(results) == 1:
                self._outages.tried(event.destination, event.id, suspected=outcome == "unavailable", answered=answered)
        elif outcome in ("published", "failed", "dead"):
            if probe and self._outages.over(event.destination, event.id):
                logger.warning("%s is back", without_secrets(event.destination))
            for result in results:
                self._outages.settled(result.event.id)

    def _see_to(self, batch: Batch) -> bool:
        """Settles the results of a batch, and extends its claim for the rest. True if the batch has ended."""
        now = time.monotonic()
        if batch.unsettled_results and now >= batch.settle_at:
            batch.settle_at = now + self._every
            try:
                batch.unsettled_results = self._claims.settle(batch, batch.unsettled_results)
            except Transient as error:
                logger.warning("the outbox: %s", error)
                if elapsed() >= batch.deadline:  # other relays have them
                    self._claims.counts["lost"] += len(batch.unsettled_results)
                    batch.unsettled_results = []
        if batch.ended:
            if batch.probe is None:
                self._quick = now - batch.began < QUICK
            return True
        if now - batch.kept > self._claims.lease / 3:
            batch.kept = now
            self._claims.extend(batch)
        return False
