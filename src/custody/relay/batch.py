"""The events of one claim: several threads publish them, the events of a key in order by one thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

from custody.elapsed import elapsed
from custody.errors import PublisherUnavailable, PublishFailed, PublishRefused
from custody.relay.publisher import ClaimedEvent, Publisher
from custody.relay.registry import Registry
from custody.relay.threads import Threads, Work
from custody.vitals import Durations

WHOLE = 2  # concurrent batches of a publisher of whole batches


class Result(NamedTuple):
    """The outcome of one event: published, failed, dead, unavailable (its destination was down), busy (its destination
    was overloaded), released (it was not tried), or lost (the claim expired before it was tried).

    `retry_after`: seconds to wait before the destination is tried again. `tried`: whether an attempt was made.
    `answered`: whether the destination, or a proxy before it, answered that it takes nothing.
    """

    event: ClaimedEvent
    outcome: str
    error: str | None = None
    retry_after: float | None = None
    tried: bool = True
    answered: bool = False


Heard = queue.SimpleQueue[tuple["Batch", Sequence[Result]] | None]
"""The queue of results from the threads of all batches; the results of one attempt come together."""


class Batch:
    """The events of one claim. `waiting` are those without a result; `unsettled_results` wait to be settled.

    `probe` is the destination that this batch probes, if it was down. `alone`: its only event may have killed relays
    before, so nothing else is begun meanwhile.
    """

    probe: str | None = None
    alone = False

    def __init__(
        self,
        claim: str,
        events: Sequence[ClaimedEvent],
        registry: Registry,
        *,
        deadline: float,
        stopping: Callable[[], bool],
        suspects: Container[int] = (),
        took: Durations,
    ) -> None:
        self.claim, self.events = claim, sorted(events, key=lambda event: event.id)
        self.began = self.kept = time.monotonic()
        self.deadline = deadline
        self.waiting = {event.id for event in events}
        self.held = set(self.waiting)
        self.unsettled_results: list[Result] = []
        self.settle_at = self.began
        self._registry, self._stopping, self._suspects, self._took = registry, stopping, suspects, took
        self._down: dict[str, str] = {}
        self._answered: set[str] = set()
        self._guard = threading.Lock()

    @property
    def ended(self) -> bool:
        return not self.waiting and not self.unsettled_results

    @property
    def unsettled(self) -> list[int]:
        return sorted(self.waiting | {result.event.id for result in self.unsettled_results})

    def start(self, threads: Threads, heard: Heard) -> None:
        self._heard = heard
        by_destination: dict[str, list[ClaimedEvent]] = {}
        for event in self.events:
            by_destination.setdefault(event.destination, []).append(event)
        for destination, events in by_destination.items():
            try:
                publisher = self._registry.of(destination)
            except PublisherUnavailable as error:
                self._unavailable(events, error, tried=False)
                continue
            if publisher.whole_batches:
                threads.submit(destination, self._work(self._publish_whole, publisher, events), share=WHOLE)
            else:
                for track in _tracks(events):
                    threads.submit(destination, self._work(self._publish_track, publisher, track))

    def _work(
        self,
        publish: Callable[[Publisher, Sequence[ClaimedEvent]], None],
        publisher: Publisher,
        events: Sequence[ClaimedEvent],
    ) -> Work:
        destination = events[0].destination

        def work() -> bool | None:
            publish(publisher, events)
            if destination in self._down:
                return False
            return True if destination in self._answered else None

        return work

    def hear(self, results: Sequence[Result]) -> None:
        """Takes results from the queue. Called in the relay's own thread."""
        self.waiting -= {result.event.id for result in results}
        self.unsettled_results += results
        if not self.waiting:
            self.settle_at = 0.0

    def _say(self, outcome: str, events: Sequence[ClaimedEvent], *what: Any) -> None:
        """Puts results into the queue; `what` are the other fields of `Result`."""
        if events:
            self._heard.put((self, [Result(event, outcome, *what) for event in events]))

    def _begins(self, event: ClaimedEvent) -> bool:
        """Whether the event may be sent now. If not, reports its result."""
        if elapsed() >= self.deadline:
            self._say("lost", [event])  # another relay may have it by now
        elif event.destination in self._down:
            self._say("released", [event], self._down[event.destination])
        elif self._stopping() or event.id not in self.held:
            self._say("released", [event])
        else:
            return True
        return False

    def _publish_track(self, publisher: Publisher, track: Sequence[ClaimedEvent]) -> None:
        """Publishes in order. After the first failure the rest is given back.

        That includes an event that was refused: its key goes on only when the death is recorded. Otherwise a relay that
        crashes before that would let a later event overtake it.
        """
        for place, event in enumerate(track):
            if not self._begins(event) or not self._attempt(publisher, event):
                self._give_back(track[place + 1 :])
                return

    def _give_back(self, events: Sequence[ClaimedEvent]) -> None:
        self._say("lost" if elapsed() >= self.deadline else "released", events)

    def _attempt(self, publisher: Publisher, event: ClaimedEvent) -> bool:
        """Makes one attempt for one event. True if it was published."""
        try:
            with self._took.measured():
                publisher.publish(event)
        except BaseException as error:  # SystemExit too, because the relay waits for a result of each event
            self._failed(event, error)
            return False
        self._answered.add(event.destination)
        self._say("published", [event])
        return True

    def _failed(self, event: ClaimedEvent, error: BaseException) -> None:
        if self._is_outage(event.destination, error) and (_busy(error) or event.id not in self._suspects):
            self._unavailable([event], error)
            return
        if not _unanswered(error):
            self._answered.add(event.destination)
        outcome = "dead" if isinstance(error, PublishRefused) else "failed"
        self._say(outcome, [event], _described(error), _retry_after(error))

    def _is_outage(self, destination: str, error: BaseException) -> bool:
        """Whether the destination is down. A timeout counts as that too, if it has not answered in this batch."""
        if isinstance(error, PublisherUnavailable):
            return True
        return _unanswered(error) and destination not in self._answered

    def _unavailable(self, events: Sequence[ClaimedEvent], error: BaseException, *, tried: bool = True) -> None:
        with self._guard:
            self._down.setdefault(events[0].destination, _described(error))
        outcome = "busy" if _busy(error) else "unavailable"
        answered = isinstance(error, PublisherUnavailable) and error.answered
        self._say(outcome, events, _described(error), _retry_after(error), tried, answered)

    def _publish_whole(self, publisher: Publisher, events: Sequence[ClaimedEvent]) -> None:
        """Publishes all at once. If that fails, and not because of an outage, one by one to find the faulty events."""
        if not self.held.issuperset(event.id for event in events):
            self._publish_tracks(publisher, events)
            return
        if not self._begins(events[0]):
            self._give_back(events[1:])
            return
        try:
            with self._took.measured():
                publisher.publish_many(events)
        except BaseException as error:
            suspect = any(event.id in self._suspects for event in events)
            if len(events) == 1:
                self._failed(events[0], error)
            elif self._is_outage(events[0].destination, error) and (_busy(error) or not suspect):
                self._unavailable(events, error)
            else:
                self._publish_tracks(publisher, events)
        else:
            self._answered.add(events[0].destination)
            self._say("published", events)

    def _publish_tracks(self, publisher: Publisher, events: Sequence[ClaimedEvent]) -> None:
        for track in _tracks(events):
            self._publish_track(publisher, track)


def _unanswered(error: BaseException) -> bool:
    return isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)


def _busy(error: BaseException) -> bool:
    return isinstance(error, PublisherUnavailable) and error.busy


def _retry_after(error: BaseException) -> float | None:
    return error.retry_after if isinstance(error, PublishFailed | PublisherUnavailable) else None


def _described(error: BaseException) -> str:
    try:
        own = isinstance(error, PublisherUnavailable | PublishRefused)
        return str(error) if own else f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ fails
        return type(error).__name__


def _tracks(events: Sequence[ClaimedEvent]) -> list[list[ClaimedEvent]]:
    """Groups events by key; each event without a key is a group of its own."""
    found: list[list[ClaimedEvent]] = []
    of_key: dict[str, list[ClaimedEvent]] = {}
    for event in events:
        if event.ordering_key is None:
            found.append([event])
        elif event.ordering_key in of_key:
            of_key[event.ordering_key].append(event)
        else:
            of_key[event.ordering_key] = [event]
            found.append(of_key[event.ordering_key])
    return found
