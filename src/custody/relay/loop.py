"""The relay's loop: claims events of the outbox, and settles and extends the batches in flight.

Any number of relays may run on one outbox. All state is in the database, so a crash costs only the time of the lease
and an attempt. An event that was published but not settled is published again, with the same event_id.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from custody.config import this_process
from custody.errors import CustodyError, InvalidArgument, Transient
from custody.model.policy import Backoff, Duration, Exponential, interval, seconds
from custody.outbox.events import without_secrets
from custody.outbox.to_topics import move_to_topics
from custody.relay.addresses import Networks
from custody.relay.batch import Batch
from custody.relay.claims import OutboxClaims
from custody.relay.in_flight import InFlightBatches
from custody.relay.outages import Outages
from custody.relay.registry import Publishers, Registry
from custody.relay.threads import Threads
from custody.store import standalone_outbox
from custody.store.postgres import Connection, Database
from custody.vitals import Vitals

logger = logging.getLogger(__name__)

AT_LEAST = 0.05  # shortest time in seconds between two claims while batches are in flight
LOOKING = 0.1  # largest share of the time for scans that find nothing
WARNING = 10.0  # seconds between two checks for events without a publisher


class HasDatabase(Protocol):
    """An open Custody."""

    @property
    def database_url(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class RelaySummary:
    """Numbers of events by outcome. `moved`: into topics of the same database; `lost`: the claim had expired when the
    outcome was known, and other relays have them; `released`: given back without an attempt."""

    published: int
    failed: int
    dead: int
    released: int
    lost: int
    moved: int


class Relay:
    """Publishes the events of an outbox. Run it in a thread of yours and `stop()` it, or see `custody relay run`.

    `publishers` maps the name before a destination's colon to a publisher; '' is for events without a destination. A
    failing event is dead after `max_attempts` attempts if it is older than `retry_for`; past `max_age` it is dead in
    any case. The lease of a claim is renewed while its events are published. The built-in publishers connect only to
    public addresses, and to those in `allow_networks` (`["10.0.0.0/8"]`).

    At most `concurrency` events of one destination are published at a time, and sixteen times as many in total. With
    `on_dead="hold"` a dead event holds back the later ones of its ordering_key until it is replayed or pruned.
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
            raise InvalidArgument(
                f"batch, concurrency and max_attempts cannot be {batch}, {concurrency} and {max_attempts}",
                "Give at least 1 for each.",
            )
        if on_dead not in ("release", "hold"):
            raise InvalidArgument(f"on_dead cannot be {on_dead!r}", "Use release or hold.")
        if seconds(lease) < 0.001:
            raise InvalidArgument(f"lease cannot be {lease!r}", "Give at least a millisecond.")
        self._batch, self._lease, self._poll = batch, seconds(lease), seconds(poll)
        most_age, retried = interval(max_age), timedelta(seconds=seconds(retry_for))
        self.name = name or this_process()
        self.outages = Outages(outage_backoff)
        self._registry = Registry(publishers or {}, built_in=built_in, networks=Networks(allow_networks))
        self._stopping = threading.Event()
        self.vitals = Vitals("relaying")
        """Its signs of life, for monitoring."""
        self._moved = 0
        self._after, self._further = 0, False
        self._from_start, self._restart_at = False, 0.0
        self._searched, self._took = 0.0, 0.0
        self._look_at, self._claim_at, self._warn_at = 0.0, 0.0, 0.0
        url = source if isinstance(source, str) else source.database_url
        self._db = Database(url, pool_size=4).acting(self.name, clock).require(self._check)
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
            took=self.vitals.took,
        )
        self._threads = Threads(concurrency)
        self._in_flight = InFlightBatches(self._claims, self.outages, self._threads, most=batch)

    def _check(self, connection: Connection) -> int:
        self._whole, release = standalone_outbox.check(connection)
        return release

    def stop(self) -> None:
        """Stops the relay gracefully: running publishes are finished and settled, the rest is given back."""
        self._stopping.set()
        self._in_flight.wake()

    def close(self) -> None:
        """Needed only after `run_once`; `run` and `drain` call it themselves. Waits for running publishes."""
        self._stopping.set()
        self._threads.close()
        with suppress(CustodyError):
            self._in_flight.settle_known_results()
        self._registry.close()
        self._db.close()

    @property
    def summary(self) -> RelaySummary:
        names = ("published", "failed", "dead", "released", "lost")
        return RelaySummary(moved=self._moved, **{name: self._claims.counts[name] for name in names})

    @property
    def in_hand(self) -> int:
        """Events that it has claimed and not settled."""
        return self._in_flight.events

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    @property
    def counts(self) -> Mapping[str, int]:
        """Events by what became of them."""
        return asdict(self.summary)

    @property
    def down(self) -> Sequence[str]:
        """Destinations that are down."""
        return self.outages.down

    def ping(self) -> None:
        """Raises if the database does not answer."""
        self._db.ping()

    def run(self) -> RelaySummary:
        """Runs until `stop`. Survives a restart of the database."""
        return self._loop(lambda: False)

    def drain(self, timeout: Duration | None = None) -> RelaySummary:
        """Runs until nothing is left that this relay can publish, including retries, or until the timeout."""
        until = None if timeout is None else time.monotonic() + seconds(timeout)

        def ended() -> bool:
            return bool(self._db.call("outbox_left", names=self._registry.names)[0][0] == 0)

        return self._loop(ended, until)

    def _loop(self, ended: Callable[[], bool], until: float | None = None) -> RelaySummary:
        pause = 0.1
        (pulse,) = self.vitals.pulses
        warned: set[str] = set()
        try:
            while self._in_flight or not self._stopping.is_set():
                pulse.beat()
                if until is not None and time.monotonic() >= until:
                    self._stopping.set()
                try:
                    # a stopping relay begins nothing: a claim could fail for as long as the database is away
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
                pulse.beat(waits=wait)
                if self._in_flight.attend(wait):
                    self._look_at = self._claim_at = 0.0
        finally:
            pulse.end()
            self.close()
        return self.summary

    def run_once(self) -> int:
        """Runs one round: moves events into topics, probes destinations that are down, and publishes one batch. Returns
        the number of events."""
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
        """Begins what is due. Returns the seconds until the next look."""
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
        """Begins a batch of due events. Returns how many; if none, `_further` tells whether to continue the scan."""
        began = time.monotonic()
        if not self._further and began >= self._restart_at:
            self._after, self._from_start = 0, True  # retries have lower ids than those scanned last
        batch, scanned = self._claimed(self._batch, after=self._after, excepted=self._in_flight.excepted)
        self._searched += time.monotonic() - began
        waits = (
            batch is None and self._in_flight.ahead
        )  # its next events wait for a batch in flight, and are found here afterwards
        if scanned is not None and not waits:
            self._after = scanned
        self._further = batch is None and scanned is not None and not waits
        if not self._further or self._in_flight.held_back:
            self._search_ended()
        if self._in_flight.held_back:  # search it from the start when nothing else is in flight
            self._further, self._restart_at = False, 0.0
        if batch is None:
            return 0
        self._in_flight.begin(batch)
        self.vitals.claimed(len(batch.events))
        return len(batch.events)

    def _claimed(self, most: int, **which: Any) -> tuple[Batch | None, int | None]:
        """A batch, if there is one, and the id to continue after. If an event has to be tried alone, nothing more is
        begun until the batches in flight have ended."""
        found = self._claims.claim(most, alone=not self._in_flight, **which)
        self._in_flight.held_back = found.held_back
        return found.batch, found.scanned

    def _search_ended(self) -> None:
        """Called when a scan has found something, or has come to the end. After a long scan the next ones continue from
        there for a while, so that a waiting backlog is not scanned again for each batch, nor by an idle relay."""
        self._took, self._searched = self._searched, 0.0
        if self._from_start:
            self._from_start = False
            self._restart_at = time.monotonic() + max(self._poll, AT_LEAST, self._took / LOOKING)

    def _move(self) -> int:
        """Moves events for topics of this database into the log."""
        moved = move_to_topics(self._db, self._meanwhile) if self._whole else 0
        self._moved += moved
        return moved

    def _probe(self) -> int:
        """Begins probes of destinations that are down, each with one event. Returns how many."""
        return sum(map(self._probe_one, self._in_flight.due_probes))

    def _probe_one(self, destination: str) -> int:
        """Probes with an event after the last one, so that no event is tried for ever. If none can be claimed now,
        others have it, or it waits; if there is no open event, the outage is over."""
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
        """Called between the steps of a long operation, so that claims in flight do not expire. False if the relay
        stops."""
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
