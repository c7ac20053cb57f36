"""The relay's loop: claims events of the outbox, and attends to the batches that are on their way.

Any number of relays may run on one outbox. A crash at any point costs the lease and an attempt: all truth is in the
database. What was published and not settled is published again, under the same event_id.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from custody.config import this_process
from custody.errors import CustodyError, InvalidArgument, Transient
from custody.model.policy import Backoff, Duration, Exponential, interval, seconds
from custody.outbox import moving
from custody.outbox.events import without_secrets
from custody.relay.addresses import Networks
from custody.relay.batch import Batch
from custody.relay.claims import OutboxClaims
from custody.relay.in_flight import InFlightBatches
from custody.relay.outages import Outages
from custody.relay.registry import Publishers, Registry
from custody.relay.threads import Threads
from custody.store import standalone
from custody.store.postgres import Database

logger = logging.getLogger(__name__)

AT_LEAST = 0.05  # seconds between two looks of a relay that has something in hand
LOOKING = 0.1  # of its time, at most, it looks through what waits and finds nothing
WARNING = 10.0  # seconds between two looks for events without a publisher


class HasDatabase(Protocol):
    """An open Custody."""

    @property
    def database_url(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RelaySummary:
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

    `publishers` are by the name before a destination's colon; '' serves events without a destination. An event whose
    attempts fail is dead when there were `max_attempts` of them and it is older than `retry_for`; past `max_age` it is
    dead in any case. The lease of a claim is renewed while it is worked on. To other addresses than public ones the
    built-in publishers connect only if `allow_networks` has them (`["10.0.0.0/8"]`).
    Of one destination `concurrency` events are published at a time, and sixteen times as many in all.
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
        retry_for: Duration = "1d",
        max_age: Duration | None = None,
        backoff: Backoff | None = None,
        outage_backoff: Backoff | None = None,
        on_dead: Literal["release", "hold"] = "release",
        concurrency: int = 8,
        poll: Duration = "200ms",
        name: str | None = None,
        built_in: bool = True,
        allow_networks: Iterable[str] = (),
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        if batch < 1 or concurrency < 1 or max_attempts < 1:
            raise InvalidArgument("batch, concurrency and max_attempts are at least 1")
        if on_dead not in ("release", "hold"):
            raise InvalidArgument(f"on_dead cannot be {on_dead!r}", "It is release or hold.")
        if seconds(lease) < 0.001:
            raise InvalidArgument("the lease is at least a millisecond")
        self._batch, self._lease, self._poll = batch, seconds(lease), seconds(poll)
        most_age, retried = interval(max_age), timedelta(seconds=seconds(retry_for))
        self.name = name or this_process()
        self._clock = clock
        self.outages = Outages(outage_backoff)
        self._registry = Registry(publishers or {}, built_in=built_in, networks=Networks(allow_networks))
        self._stopping = threading.Event()
        self._moved = 0
        self._after, self._further = 0, False
        self._from_start, self._restart_at = False, 0.0
        self._searched, self._took = 0.0, 0.0
        self._look_at, self._claim_at, self._warn_at = 0.0, 0.0, 0.0
        self._db = Database(source if isinstance(source, str) else source.database_url, pool_size=4)
        try:
            with self._db.connection() as connection:
                self._whole = standalone.check(connection)
        except BaseException:
            self._db.close()
            raise
        self._claims = OutboxClaims(
            db=self._db,
            registry=self._registry,
            relay=self.name,
            lease=self._lease,
            max_attempts=max_attempts,
            retry_for=retried,
            max_age=most_age,
            backoff=backoff or Exponential("1s", cap="5m", jitter=0.2),
            hold=on_dead == "hold",
            stopping=self._stopping.is_set,
            suspects=self.outages.suspects,
            lone=self.outages.lone,
            clock=clock,
        )
        self._threads = Threads(concurrency)
        self._in_flight = InFlightBatches(self._claims, self.outages, self._threads, most=batch)

    def stop(self) -> None:
        """Ends the relay gracefully: what is being published is finished and settled, the rest is given back."""
        self._stopping.set()
        self._in_flight.wake()

    def close(self) -> None:
        """For who calls `run_once` by hand; `run` and `drain` do it themselves. What is being published is finished."""
        self._stopping.set()
        self._threads.close()
        with suppress(CustodyError):
            self._in_flight.last_words()
        self._registry.close()
        self._db.close()

    @property
    def summary(self) -> RelaySummary:
        names = ("published", "failed", "dead", "released", "lost")
        return RelaySummary(moved=self._moved, **{name: self._claims.counts[name] for name in names})

    def run(self) -> RelaySummary:
        """Relays until `stop`. Survives a restart of the database."""
        return self._loop(lambda: False)

    def drain(self, timeout: Duration | None = None) -> RelaySummary:
        """Relays until nothing is left that this relay could publish, retries included, or the time is over: then it
        stops."""
        until = None if timeout is None else time.monotonic() + seconds(timeout)

        def ended() -> bool:
            return bool(self._db.call("outbox_left", names=self._registry.names)[0][0] == 0)

        return self._loop(ended, until)

    def _loop(self, ended: Callable[[], bool], until: float | None = None) -> RelaySummary:
        pause = 0.1
        warned: set[str] = set()
        try:
            while self._in_flight or not self._stopping.is_set():
                if until is not None and time.monotonic() >= until:
                    self._stopping.set()
                try:
                    # who stops only ends what has begun: looking could fail for as long as the database is away
                    wait = self._poll if self._stopping.is_set() else self._look()
                    if wait > 0 and not self._in_flight:
                        self._warn_unserved(warned)
                        if ended():
                            break
                    pause = 0.1
                except Transient as error:
                    logger.warning("the outbox: %s", error)
                    wait, pause = pause, min(pause * 2, 5.0)
                if until is not None and not self._stopping.is_set():
                    wait = min(wait, max(0.0, until - time.monotonic()))
                if self._in_flight.attend(wait):
                    self._look_at = self._claim_at = 0.0
        finally:
            self.close()
        return self.summary

    def run_once(self) -> int:
        """One round: topics of this database, destinations that were down, and one batch. Returns how many events."""
        handled = self._move() + self._probe()
        while self._in_flight:
            self._in_flight.attend(self._poll)
        self._restart_at = 0.0
        begun = self._claim()
        while begun == 0 and self._further:
            begun = self._claim()
        while self._in_flight:
            self._in_flight.attend(self._poll)
        return handled + begun

    def _look(self) -> float:
        """Begins what there is to do. Returns for how many seconds there is nothing more to begin."""
        now = time.monotonic()
        if now < self._look_at:
            return self._look_at - now
        begun = self._move() + self._probe()
        if self._in_flight.room and now >= self._claim_at:
            begun += self._claim()
            if begun == 0 and self._further:
                return 0.0
            self._claim_at = time.monotonic() + self._took / LOOKING if begun == 0 and self._in_flight else 0.0
        if begun:
            return 0.0
        wait = max(self._poll, AT_LEAST) if self._in_flight else self._poll
        self._look_at = now + wait
        return wait

    def _claim(self) -> int:
        """Begins a batch of what is due. Returns how many events; if none, `_further` says whether to look further."""
        began = time.monotonic()
        if not self._further and began >= self._restart_at:
            self._after, self._from_start = 0, True  # retries lie behind what was scanned
        batch, scanned = self._claimed(self._batch, after=self._after, excepted=self._in_flight.excepted)
        self._searched += time.monotonic() - began
        waits = batch is None and self._in_flight.ahead  # for the batch before: it lies here, and is next
        if scanned is not None and not waits:
            self._after = scanned
        self._further = batch is None and scanned is not None and not waits
        if not self._further or self._in_flight.held_back:
            self._search_ended()
        if self._in_flight.held_back:  # looked for from the beginning, when nothing else is in hand
            self._further, self._restart_at = False, 0.0
        if batch is None:
            return 0
        self._in_flight.begin(batch)
        return len(batch.events)

    def _claimed(self, most: int, **which: Any) -> tuple[Batch | None, int | None]:
        """A batch, if there is one, and the id to go on behind. If an event is to be tried alone, nothing more is begun
        until what is in hand has ended."""
        found = self._claims.claim(most, alone=not self._in_flight, **which)
        self._in_flight.held_back = found.held_back
        return found.batch, found.scanned

    def _search_ended(self) -> None:
        """It has found something, or nothing is left. After one that took long the next goes on from there for a while:
        a backlog that waits is not passed again for each batch, nor by a relay that is idle."""
        self._took, self._searched = self._searched, 0.0
        if self._from_start:
            self._from_start = False
            self._restart_at = time.monotonic() + max(self._poll, AT_LEAST, self._took / LOOKING)

    def _move(self) -> int:
        """What is meant for topics of this database: into the log."""
        moved = moving.move(self._db, self._now(), self._meanwhile) if self._whole else 0
        self._moved += moved
        return moved

    def _probe(self) -> int:
        """Begins to try destinations that were down, each with one event. Returns how many."""
        return sum(map(self._probe_one, self._in_flight.unprobed))

    def _probe_one(self, destination: str) -> int:
        """With an event behind the last one, so that none is tried for ever. If there is none to be had now, others
        have it, or it waits; if nothing is open there is no outage either."""
        last = self.outages.last(destination)
        for first, end in ((last, None), (0, last)) if last else ((0, None),):
            after: int | None = first
            while after is not None and (end is None or after < end):
                if not self._meanwhile() or self._in_flight.closed:
                    return 0
                batch, after = self._claimed(1, after=after, only=[destination])
                if batch is not None:
                    self._in_flight.begin(batch, probe=destination)
                    return 1
        if self._db.call("outbox_waits", destination=destination)[0][0]:
            self.outages.later(destination)
        else:
            self.outages.over(destination)
        return 0

    def _meanwhile(self) -> bool:
        """Between two steps of something that may take long: attends to the batches, whose claims would expire. False
        if the relay stops."""
        if self._in_flight.attend(0):
            self._claim_at = 0.0
        return not self._stopping.is_set()

    def _warn_unserved(self, warned: set[str]) -> None:
        if time.monotonic() < self._warn_at:
            return
        self._warn_at = time.monotonic() + WARNING
        for destination, events in self._db.call("outbox_unserved", names=self._registry.names):
            if destination not in warned:
                warned.add(destination)
                where = without_secrets(destination) or "the default"
                logger.warning("%d events wait for %s, and this relay has no publisher for it", events, where)

    def _now(self) -> datetime | None:
        return None if self._clock is None else self._clock()
