"""The relay's loop: claims events of the outbox, has them published, and settles what it still holds.

Any number of relays may run on one outbox. A crash at any point costs the lease and an attempt: all truth is in the
database. What was published and not settled is published again, under the same event_id.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from custody.config import this_process
from custody.errors import InvalidArgument, Transient
from custody.outbox import moving
from custody.policy import Backoff, Duration, Exponential, interval, seconds
from custody.relay.batch import Batch
from custody.relay.claims import Claims
from custody.relay.pausing import Outages
from custody.relay.registry import Publishers, Registry
from custody.store import standalone
from custody.store.postgres import Database

logger = logging.getLogger(__name__)

SETTLE_EVERY = 0.5  # seconds after which what has been published is settled, though the rest of the batch still runs


class HasDatabase(Protocol):
    """An open Custody."""

    @property
    def database_url(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a relay did. `moved` events went into topics of the same database; `lost` ones had expired when their
    outcome was known, and others have them; `released` ones were given back without an attempt."""

    published: int
    failed: int
    dead: int
    released: int
    lost: int
    moved: int


class Relay:
    """Publishes the events of an outbox. Run it in a thread of yours and `stop()` it, or see `custody relay run`.

    `publishers` are by the name before a destination's colon; '' serves events without a destination. An event is
    tried `max_attempts` times and for no longer than `max_age`; the lease of a claim is renewed while it is worked on.
    With `on_dead="hold"` a dead event holds back the later ones of its ordering_key until it is replayed or pruned.
    """

    def __init__(
        self,
        source: str | HasDatabase,
        publishers: Publishers | None = None,
        *,
        batch: int = 100,
        lease: Duration = "30s",
        max_attempts: int = 10,
        max_age: Duration | None = None,
        backoff: Backoff | None = None,
        outage_backoff: Backoff | None = None,
        on_dead: Literal["release", "hold"] = "release",
        concurrency: int = 8,
        poll: Duration = "200ms",
        name: str | None = None,
        built_in: bool = True,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        if batch < 1 or concurrency < 1 or max_attempts < 1:
            raise InvalidArgument("batch, concurrency and max_attempts are at least 1")
        if on_dead not in ("release", "hold"):
            raise InvalidArgument(f"on_dead cannot be {on_dead!r}", "It is release or hold.")
        if seconds(lease) < 0.001:
            raise InvalidArgument("the lease is at least a millisecond")
        self._batch, self._lease, self._poll = batch, seconds(lease), seconds(poll)
        most_age = interval(max_age)
        self.name = name or this_process()
        self._clock = clock
        self.outages = Outages(outage_backoff)
        self._registry = Registry(publishers or {}, built_in=built_in)
        self._stopping = threading.Event()
        self._moved = 0
        self._after, self._wrapped, self._quick = 0, 0.0, False
        self._db = Database(source if isinstance(source, str) else source.database_url, pool_size=4)
        with self._db.connection() as connection:
            self._whole = standalone.check(connection)
        self._claims = Claims(
            db=self._db,
            registry=self._registry,
            relay=self.name,
            lease=self._lease,
            max_attempts=max_attempts,
            max_age=most_age,
            backoff=backoff or Exponential("1s", cap="5m", jitter=0.2),
            hold=on_dead == "hold",
            stopping=self._stopping.is_set,
            clock=clock,
        )
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="custody-publisher")

    def stop(self) -> None:
        """Ends the relay gracefully: what is being published is finished and settled, the rest is given back."""
        self._stopping.set()

    def close(self) -> None:
        """For who calls `run_once` by hand; `run` and `drain` do it themselves."""
        self._threads.shutdown(wait=True)
        self._registry.close()
        self._db.close()

    @property
    def summary(self) -> Summary:
        names = ("published", "failed", "dead", "released", "lost")
        return Summary(moved=self._moved, **{name: self._claims.counts[name] for name in names})

    def run(self) -> Summary:
        """Relays until `stop`. Survives a restart of the database."""
        return self._loop(lambda: False)

    def drain(self, timeout: Duration | None = None) -> Summary:
        """Relays until nothing is left that this relay could publish, retries included, or the time is over."""
        until = None if timeout is None else time.monotonic() + seconds(timeout)

        def ended() -> bool:
            if until is not None and time.monotonic() >= until:
                return True
            return bool(self._db.call("outbox_left", names=self._registry.names)[0][0] == 0)

        return self._loop(ended)

    def _loop(self, ended: Callable[[], bool]) -> Summary:
        pause = 0.1
        warned: set[str] = set()
        ahead: Batch | None = None
        try:
            while ahead is not None or not self._stopping.is_set():
                try:
                    # who stops only ends what has begun: what is aside could fail for as long as the database is away
                    handled = 0 if self._stopping.is_set() else self._aside(ahead)
                    batch, ahead = ahead or self._begun(), None
                    if batch is not None:
                        ahead = self._look_ahead(batch)
                        self._finish(batch, ahead)
                    elif handled == 0:
                        self._warn_unserved(warned)
                        if ended():
                            break
                        self._stopping.wait(self._poll)
                    pause = 0.1
                except Transient as error:
                    logger.warning("the outbox: %s", error)
                    self._stopping.wait(pause)
                    pause = min(pause * 2, 5.0)
        finally:
            self.close()
        return self.summary

    def run_once(self) -> int:
        """One round: topics of this database, destinations that were down, and one batch. Returns how many events."""
        handled = self._aside()
        batch = self._begun()
        if batch is None:
            return handled
        self._finish(batch)
        return handled + len(batch.events)

    def _aside(self, ahead: Batch | None = None) -> int:
        """What is no batch: topics of this database, and destinations that were down. Returns how many events."""
        handled = self._move() if self._whole else 0
        for destination in self.outages.due():
            handled += self._probe(destination, ahead)
        return handled

    def _begun(self) -> Batch | None:
        """The next batch, on its way to the publishers; None if nothing is due."""
        if time.monotonic() - self._wrapped > max(self._poll, 0.05):
            self._after, self._wrapped = 0, time.monotonic()  # retries lie behind what was scanned
        while True:
            batch, scanned = self._claims.claim(self._batch, after=self._after, excepted=self.outages.down)
            self._after = scanned or 0
            if batch is not None:
                batch.start(self._threads)
                return batch
            if scanned is None or self._stopping.is_set():
                return None

    def _look_ahead(self, batch: Batch) -> Batch | None:
        """The batch after this one, begun while this one is published: the two databases work side by side.

        The claim sees to the order of keys, as between two relays. Only while batches are full and quick: else there
        is nothing to be had, or the next one would wait here while another relay could have it.
        """
        if len(batch.events) < self._batch or not self._quick or self._stopping.is_set():
            return None
        try:
            ahead, scanned = self._claims.claim(self._batch, after=self._after, excepted=self.outages.down)
        except Transient as error:
            logger.warning("the outbox: %s", error)
            return None
        if ahead is not None:
            self._after = scanned or 0  # else what waits for this batch lies there, and is next
            ahead.start(self._threads)
        return ahead

    def _move(self) -> int:
        """What is meant for topics of this database: into the log."""
        moved = moving.move(self._db, self._now())
        self._moved += moved
        return moved

    def _probe(self, destination: str, ahead: Batch | None) -> int:
        """One event for a destination that was down. Without any there is nothing to wait for."""
        after: int | None = 0
        while after is not None:
            batch, after = self._claims.claim(1, after=after, only=[destination])
            if batch is not None:
                batch.start(self._threads)
                self._finish(batch, ahead, probe=True)
                return 1
        self.outages.over(destination)
        return 0

    def _finish(self, batch: Batch, ahead: Batch | None = None, *, probe: bool = False) -> None:
        """Settles a batch as its results come, until it has them all; the one after it is not forgotten meanwhile."""
        every = min(SETTLE_EVERY, self._lease / 4)
        while batch.waiting:
            self._attend(batch, every)
            if batch.waiting and ahead is not None:
                self._attend(ahead, 0.0)
        self._quick = time.monotonic() - batch.began < SETTLE_EVERY
        for destination in {event.destination for event in batch.events}:
            if destination not in batch.down:
                if self.outages.over(destination):
                    logger.warning("%s is back", destination)
            elif probe or destination not in self.outages.down:  # the batch before may have found out already
                wait = self.outages.failed(destination)
                logger.warning("%s is down, tried again in %.1f s: %s", destination, wait, batch.down[destination])

    def _attend(self, batch: Batch, wait: float) -> None:
        results = batch.take(wait)
        if results:
            self._claims.settle(batch, results)
        if batch.waiting and time.monotonic() - batch.kept > self._lease / 3:
            batch.kept = time.monotonic()
            self._claims.extend(batch)

    def _warn_unserved(self, warned: set[str]) -> None:
        for destination, events in self._db.call("outbox_unserved", names=self._registry.names):
            if destination not in warned:
                warned.add(destination)
                shown = destination or "the default"
                logger.warning("%d events wait for %s, and this relay has no publisher for it", events, shown)

    def _now(self) -> datetime | None:
        return None if self._clock is None else self._clock()
