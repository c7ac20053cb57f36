"""The batches that a relay has in hand: begun, settled as their results come, and kept for as long as they take.

Batches wait for nothing but their own events, so that a slow destination holds up no other. The order of keys is the
claim's business: to the outbox several batches look like several relays.
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

QUICK = 0.5  # seconds: a batch that takes longer is slow, and what has been published of it is settled meanwhile


class InFlightBatches:
    """Only the relay's own thread calls it, `wake` excepted."""

    def __init__(self, claims: OutboxClaims, outages: Outages, threads: Threads, *, most: int) -> None:
        """`most`: the events of a full batch."""
        self._claims, self._outages, self._threads, self._most = claims, outages, threads, most
        self._every = min(QUICK, claims.lease / 4)
        self._batches: list[Batch] = []
        self._heard: Heard = queue.SimpleQueue()
        self._quick = False
        self.held_back = False  # an event that is to be tried alone waits until nothing is in hand

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def excepted(self) -> list[str]:
        """The destinations that get no batch now: those that are down, and slow ones that have all they can do."""
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
        """Whether nothing may begin: an event is tried alone, or is to be as soon as what is in hand has ended. One
        that takes longer than a lease is no longer alone: it would hold up all destinations."""
        if self.held_back and self._batches:
            return True
        now = time.monotonic()
        return any(batch.alone and now - batch.began < self._claims.lease for batch in self._batches)

    @property
    def unprobed(self) -> list[str]:
        """The destinations that were down and are to be tried now, with one event each, and not too many at a time."""
        probed = {batch.probe for batch in self._batches if batch.probe is not None}
        due = [destination for destination in self._outages.due() if destination not in probed]
        return due[: max(0, self._threads.share - len(probed))]

    @property
    def ahead(self) -> bool:
        """Whether there is a batch that should be done soon."""
        return any(self._fresh())

    @property
    def room(self) -> bool:
        """Whether another batch may be begun: beside slow ones always, beside a quick one if that is full.

        Of full and quick batches two are in hand, so that both databases work side by side. Of others there would be
        nothing to be had, or it would wait here while another relay could have it.
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
        """Ends the waiting of `attend`. May be called by any thread, and while a signal is handled."""
        self._heard.put(None)

    def attend(self, seconds: float) -> bool:
        """Waits for so long at most, or until all of a batch was heard; then sees to every batch. True if one has
        ended."""
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

    def last_words(self) -> None:
        """Settles what is known, once: the relay ends, and its threads have."""
        while not self._heard.empty():
            heard = self._heard.get()
            if heard is not None:
                self._hear(*heard)
        for batch in self._batches:
            self._claims.settle(batch, batch.unsettled_results)

    def _fresh(self) -> list[Batch]:
        """The batches, probes excepted, of which it is not known yet that they are slow."""
        now = time.monotonic()
        return [b for b in self._batches if b.probe is None and now - b.began < QUICK]

    def _hear(self, batch: Batch, results: Sequence[Result]) -> None:
        batch.hear(results)
        event, outcome, error, retry_after, _, answered = results[0]
        probe = batch.probe is not None
        if outcome in ("unavailable", "busy"):
            if probe or event.destination not in self._outages.down:  # a batch before may have found out already
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
        """Settles what is known and keeps the rest. True if nothing is left of it."""
        now = time.monotonic()
        if batch.unsettled_results and now >= batch.settle_at:
            batch.settle_at = now + self._every
            try:
                batch.unsettled_results = self._claims.settle(batch, batch.unsettled_results)
            except Transient as error:
                logger.warning("the outbox: %s", error)
                if elapsed() >= batch.deadline:  # then others have them
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
