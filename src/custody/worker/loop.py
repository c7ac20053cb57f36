"""The worker's loop: claims what it can handle, extends the leases, and stops without losing anything.

Threads: the caller's claims; `concurrency` threads run handlers; one settles in batches; one extends leases; one
listens for notifications; one does the upkeep of retention; one, for all workers of a client, publishes the ticks of
schedules. A crash only delays messages by the visibility timeout, because all state is in the database.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Protocol
from uuid import UUID

from custody.elapsed import elapsed, holds_until
from custody.errors import CustodyError, InvalidArgument, LeaseLost, NotFound, Transient
from custody.handlers import payload_of, require_handler
from custody.model.bounds import Bounded
from custody.model.entities import Group, Settled
from custody.model.outcomes import Counts, Outcome, outcome_of
from custody.model.policy import Duration, seconds, seconds_or_none
from custody.model.tracebacks import stack_of
from custody.verbs.claim import Lease
from custody.verbs.upkeep import EVERY, keep_up
from custody.vitals import Running, Vitals
from custody.worker.handler_runner import Handler, HandlerRunner, NotBegun
from custody.worker.leases import HeldLease, Run, Track, held, tracks
from custody.worker.settling import Settling

logger = logging.getLogger(__name__)

AHEAD = 0.25  # seconds of work to claim ahead: enough to keep the threads busy, little to redeliver after a crash
MOST_AT_ONCE = 1000
BUSY = 0.03
SOON = 0.005  # seconds; the shortest wait for a due message
QUICK = 0.005  # seconds; for faster handlers a second lease of an ordered group is not worth it


class Verbs(Protocol):
    """The part of Custody that the worker uses."""

    def group(self, topic: str, group: str) -> Group: ...
    def claim(
        self,
        topic: str,
        group: str,
        *,
        max_messages: int,
        visibility_timeout: Duration | None,
        settle: UUID | None = None,
        outcomes: dict[int, Outcome] | None = None,
    ) -> Lease: ...
    def ack(self, lease_id: UUID) -> Settled: ...
    def settle(self, lease_id: UUID, outcomes: dict[int, Outcome] | Outcome) -> Settled: ...
    def extend(self, lease_id: UUID, timeout: Duration) -> datetime: ...
    def next_due(self, topic: str, group: str) -> float | None: ...
    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]: ...
    def maintain(self, topic: str | None) -> object: ...
    def ticking(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, kw_only=True)
class WorkerSummary(Counts):
    """What a worker did."""


class Worker(Bounded):
    """Runs a handler over a group's messages: keys in parallel, one key in order. See `Custody.work`."""

    def __init__(
        self,
        verbs: Verbs,
        topic: str,
        group: str,
        handler: Handler,
        *,
        payload: type | None = None,
        concurrency: int = 8,
        max_messages: int | None = None,
        visibility_timeout: Duration | None = None,
        poll: Duration = "1s",
        grace: Duration = "30s",
        upkeep: Duration = EVERY,
        loop: AbstractEventLoop | None = None,
    ) -> None:
        """`loop`: where coroutines of the handler run; by default one of their own."""
        require_handler(handler, generators=False, coroutines=True)
        policy = verbs.group(topic, group).policy
        if policy is None:
            # a bare group: the verb refuses it with its own error
            verbs.claim(topic, group, max_messages=1, visibility_timeout=None)
            raise AssertionError("a claim on a bare group was accepted")
        self._verbs, self._topic, self._group, self._handler = verbs, topic, group, handler
        self._payload, self._loop = payload_of(handler, payload), loop
        self._ordered = policy.ordering == "key"
        self._on_dead = policy.on_dead
        self._handler_timeout = seconds_or_none(policy.handler_timeout)
        self._visibility = seconds(policy.visibility_timeout if visibility_timeout is None else visibility_timeout)
        if self._visibility < 0.001:
            wrong = f"visibility_timeout cannot be {visibility_timeout!r}"
            raise InvalidArgument(wrong, "It is at least a millisecond.")
        self._concurrency, self._fixed_size = concurrency, max_messages
        self._poll, self._grace, self._upkeep = seconds(poll), seconds(grace), seconds(upkeep)
        self._counts: Counter[str] = Counter()
        self.vitals = Vitals("claiming", "settling", "extending leases")
        """Its signs of life and counts, for monitoring."""
        self._pulse, self._settling_pulse, self._keeper_pulse = self.vitals.pulses
        self._wake, self._stopping, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._tracks: queue.SimpleQueue[Track | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._leases: set[HeldLease] = set()
        self._runs: set[Run] = set()
        self._hands: list[threading.Thread] = []
        self._in_hand = 0
        self._took = 0.0  # moving average of the handler's duration
        self._error: Exception | None = None
        self._overdue = 0.0  # the last pause, if a message was overdue but could not be claimed
        self.waiting_for: str | None = None
        """Why nothing is claimed now: empty, busy, paused, a limit, or an unreachable database."""

    @property
    def summary(self) -> WorkerSummary:
        """What it has done so far."""
        return WorkerSummary(**self._counts)

    @property
    def in_hand(self) -> int:
        """Messages under its leases that are not settled."""
        return self._in_hand

    @property
    def running(self) -> Running:
        """The calls of its handler that run now."""
        with self._guard:
            begun = [run.started for run in self._runs]
        return Running.since(begun)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self) -> None:
        """Stops gracefully: running handlers finish and are settled, messages not started are released."""
        self._stopping.set()
        self._wake.set()

    def run(self) -> WorkerSummary:
        """Works until `stop`. Survives a restart of the database. Raises if the topic or group was deleted, or on an
        error that no retry can fix."""
        self._call = HandlerRunner(self._handler, self._handler_timeout, self._group, self._payload, self._loop)
        self._settling = Settling(
            self._verbs.settle,
            self._finish,
            self._counts,
            self.vitals,
            self._settling_pulse,
            self._settled,
            self._fail,
        )
        stop_listening = self._verbs.listen(self._topic, self._wake.set)
        for _ in range(self._concurrency):
            self._add_hand()
        keeper = threading.Thread(target=self._keep, name="custody-keeper", daemon=True)
        keeper.start()
        maintain = partial(self._verbs.maintain, self._topic)
        threading.Thread(
            target=keep_up, args=[maintain, self._ended, self._upkeep], name="custody-upkeep", daemon=True
        ).start()
        try:
            with self._verbs.ticking():
                self._claim_until_stopped()
        finally:
            self._pulse.end()
            try:
                self._wind_down()
            finally:
                self._ended.set()  # in any case, or the keeper would extend the leases for ever
                keeper.join(1)  # it may be waiting for a database that is down
                stop_listening()
                self._call.close()
        if self._error is not None:
            raise self._error
        return self.summary

    def _claim_until_stopped(self) -> None:
        pause = 0.1
        while not self._stopping.is_set():
            self._wake.clear()
            self._pulse.beat()
            wanted = self._wanted()
            if wanted <= 0:
                self._sleep(self._poll)
                continue
            try:
                sent = elapsed()
                lease = self._verbs.claim(
                    self._topic, self._group, max_messages=wanted, visibility_timeout=self._visibility
                )
                if lease:
                    self._take(lease, sent, wanted)
                    pause = 0.1
                else:
                    self._wait(lease.reason or "empty", lease.detail)
            except NotFound:
                raise
            except Transient as error:
                self._say(f"the database: {error}")
                self._stopping.wait(pause)
                pause = min(pause * 2, 5.0)

    def _sleep(self, seconds: float) -> None:
        """Waits for something to claim."""
        self._pulse.beat(waits=seconds)
        self._wake.wait(seconds)

    def _wanted(self) -> int:
        """How many messages to claim: none while enough are waiting, else as many as the threads handle in AHEAD."""
        with self._guard:
            size = self._size()
            starving = self._concurrency - len(self._runs) > self._tracks.qsize()
            if self._one_at_a_time():
                return size if self._in_hand == 0 else 0
            if not self._ordered and self._in_hand < max(size // 2, self._concurrency):
                return size
            return size if starving else 0

    def _size(self) -> int:
        if self._fixed_size is not None:
            return self._fixed_size
        ahead = MOST_AT_ONCE if self._took == 0 else int(self._concurrency * AHEAD / self._took)
        return max(self._concurrency, min(MOST_AT_ONCE, ahead))

    def _one_at_a_time(self) -> bool:
        """Whether a second lease would find its keys in the first one and park their messages, only to wake them
        soon."""
        return self._ordered and self._took < QUICK

    def _finish(self, lease: HeldLease, outcomes: dict[int, Outcome]) -> Settled:
        """Settles all that is left of a lease. If the worker has no other one and there are probably more messages, the
        next claim is part of it. Called by the settling thread; nobody else claims as long as this lease is in hand."""
        with self._guard:
            last = self._one_at_a_time() and lease.full and self._in_hand == len(lease.open)
            wanted = self._size()
        acks = lease.open == outcomes.keys() and all(outcome.kind == "ack" for outcome in outcomes.values())
        alone = (
            partial(self._verbs.ack, lease.lease_id) if acks else partial(self._verbs.settle, lease.lease_id, outcomes)
        )
        if not last or self._stopping.is_set():
            return alone()
        sent = elapsed()
        try:
            following = self._verbs.claim(
                self._topic,
                self._group,
                max_messages=wanted,
                visibility_timeout=self._visibility,
                settle=lease.lease_id,
                outcomes=None if acks else outcomes,
            )
        except Transient:
            raise
        except CustodyError:  # the claim was refused, so nothing was settled; the loop's own claim reports it
            return alone()
        if following:
            self._take(following, sent, wanted)
        if following.lost is not None:
            raise following.lost
        assert following.settled is not None, "a claim has not answered to its settle"
        return following.settled

    def _take(self, lease: Lease, sent: float, wanted: int) -> None:
        """Hands the messages to the handlers. If the worker stops, they may have ended: then it releases them."""
        self.waiting_for, self._overdue = None, 0.0
        self.vitals.claimed(len(lease), sum(message.attempt > 1 for message in lease))
        taken = held(lease, holds_until(sent, self._visibility), wanted=wanted)
        with self._guard:
            if not self._stopping.is_set():
                self._leases.add(taken)
                self._in_hand += len(lease)
                for track in tracks(taken, lease.messages, ordered=self._ordered):
                    self._tracks.put(track)
                return
        with suppress(CustodyError):  # they come back when the lease expires
            self._verbs.settle(lease.lease_id, Outcome("release"))

    def _wait(self, reason: str, detail: str | None) -> None:
        self._say(reason if detail is None else f"{reason}: {detail}")
        if reason == "busy" and detail is not None:
            return  # no bound message among those scanned; claim again
        if reason == "busy":
            # others are claiming: retry soon, with jitter
            self._sleep(random.uniform(0.002, BUSY))
            return
        due = self._verbs.next_due(self._topic, self._group)
        if due is not None and due <= 0:  # locked, for example by an open transaction that settles an expired lease
            self._overdue = due = min(self._poll, max(SOON, 2 * self._overdue))
        else:
            self._overdue = 0.0
        self._sleep(self._poll if due is None else max(SOON, min(self._poll, due)))

    def _say(self, reason: str) -> None:
        if reason != self.waiting_for:
            log = logger.debug if reason in ("empty", "busy") else logger.warning
            log("%s/%s waits: %s", self._topic, self._group, reason)
            self.waiting_for = reason

    def _settled(self, lease: HeldLease) -> None:
        """Updates what is in hand, after a settle and when a lease is lost."""
        with self._guard:
            if lease.lost and lease in self._leases:
                self.vitals.leases_lost += 1
            if lease.lost or not lease.open:
                self._leases.discard(lease)
            self._in_hand = sum(len(other.open) for other in self._leases)
        self._wake.set()

    def _fail(self, error: Exception) -> None:
        """Ends the work with an error that no retry can fix; `run` raises it."""
        logger.error("the worker stops: %s", error, exc_info=error)
        self._error = error
        self.stop()

    def _add_hand(self) -> None:
        hand = threading.Thread(target=self._handle_tracks, name="custody-handler", daemon=True)
        with self._guard:
            self._hands.append(hand)
        hand.start()

    def _handle_tracks(self) -> None:
        """One handler thread: runs tracks until it is told to end, or was abandoned as stuck."""
        while (track := self._tracks.get()) is not None:
            for place, message in enumerate(track.messages):
                if track.lease.lost:
                    break
                if message.offset not in track.lease.open:
                    continue  # a rewind removed it from the lease
                if self._stopping.is_set():
                    self._settling.add(track.lease, message, Outcome("release"))
                    break  # in an ordered group the release includes the later messages of the key
                run = Run(track.lease, message, threading.current_thread())
                with self._guard:
                    self._runs.add(run)
                raised = self._call(message, track.lease.holds)
                outcome = Outcome("release") if isinstance(raised, NotBegun) else outcome_of(raised)
                took = time.monotonic() - run.started
                self.vitals.took.add(took)
                with self._guard:
                    if run.given_up:
                        return  # already reported; another thread has replaced this one
                    self._runs.discard(run)
                    if outcome.kind != "release":
                        self._took = took if self._took == 0 else 0.9 * self._took + 0.1 * took
                stopped = outcome.stops_key(self._on_dead)
                if stopped:
                    track.lease.behind.update([later.offset for later in track.messages[place + 1 :]])
                self._settling.add(track.lease, message, outcome)
                if stopped:
                    break

    def _keep(self) -> None:
        """Extends the leases that still have messages in hand, and abandons handlers that time out."""
        every, pulse = max(0.02, self._visibility / 3), self._keeper_pulse
        if self._handler_timeout is not None:
            every = min(every, max(0.02, self._handler_timeout / 4))
        extended = time.monotonic()
        pulse.beat(waits=every)
        while not self._ended.wait(every):
            pulse.beat(waits=every)
            self._give_up_stuck()
            if time.monotonic() - extended < self._visibility / 3 - 0.01:
                continue
            extended = time.monotonic()
            with self._guard:
                leases = [lease for lease in self._leases if lease.open and not lease.lost]
            for lease in leases:
                pulse.beat(waits=every)
                try:
                    sent = elapsed()
                    self._verbs.extend(lease.lease_id, self._visibility)
                    lease.expires = holds_until(sent, self._visibility)
                except LeaseLost as error:
                    lease.lose(error.lost)
                    if not lease.lost:  # otherwise the rest of it was extended
                        lease.expires = holds_until(sent, self._visibility)
                    self._settled(lease)
                except CustodyError as error:
                    logger.warning("lease %s could not be extended: %s", lease.lease_id, error)
        pulse.end()

    def _give_up_stuck(self) -> None:
        if self._handler_timeout is None or self._call.ends_stuck_handlers:
            return
        with self._guard:
            stuck = [run for run in self._runs if time.monotonic() - run.started > self._handler_timeout]
            for run in stuck:
                run.given_up = True
                self._runs.discard(run)
                self._hands.remove(run.thread)
        for run in stuck:
            logger.error(
                "the handler has been running for more than %g s on %s/%d/%d; thread %s is abandoned",
                self._handler_timeout, self._topic, run.message.partition, run.message.offset, run.thread.name,
            )  # fmt: skip
            error = f"the handler took longer than {self._handler_timeout:g} s"
            outcome = Outcome("nack", error=error, traceback=stack_of(run.thread))
            self._settling.add(run.lease, run.message, outcome)
            self._add_hand()

    def _wind_down(self) -> None:
        """Waits for running handlers, releases the rest and settles everything, within the grace period."""
        self._stopping.set()
        until = time.monotonic() + self._grace
        with self._guard:  # from here on nothing more is taken
            hands = list(self._hands)
        with suppress(queue.Empty):
            while (track := self._tracks.get_nowait()) is not None:
                self._settling.add(track.lease, track.messages[0], Outcome("release"))
        for _ in hands:
            self._tracks.put(None)
        for hand in hands:
            hand.join(max(0.0, until - time.monotonic()))
        self._settling.close(max(1.0, until - time.monotonic()))
