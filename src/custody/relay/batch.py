"""One claim of a relay on its way: events are published by several threads, a key by one of them in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

from custody.errors import PublisherUnavailable, PublishRefused
from custody.relay.publisher import Claimed, Publisher
from custody.relay.registry import Registry


class Result(NamedTuple):
    """What came of one event: published, failed, dead, released, or lost (the claim ran out before it was begun)."""

    event: Claimed
    outcome: str
    error: str | None = None


class Batch:
    """The events of one claim. `take` hands over what came of them; `waiting` are those of which nothing was heard."""

    def __init__(
        self,
        claim: str,
        events: Sequence[Claimed],
        registry: Registry,
        *,
        deadline: float,
        stopping: Callable[[], bool],
    ) -> None:
        self.claim, self.events = claim, sorted(events, key=lambda event: event.id)
        self.began = self.kept = time.monotonic()
        self.deadline = deadline
        self.waiting = {event.id for event in events}
        self.down: dict[str, str] = {}
        self._registry, self._stopping = registry, stopping
        self._results: queue.SimpleQueue[Sequence[Result]] = queue.SimpleQueue()
        self._guard = threading.Lock()

    def start(self, threads: Executor) -> None:
        by_destination: dict[str, list[Claimed]] = {}
        for event in self.events:
            by_destination.setdefault(event.destination, []).append(event)
        for destination, events in by_destination.items():
            publisher = self._registry.of(destination)
            if publisher.whole_batches:
                threads.submit(self._publish_whole, publisher, events)
            else:
                for track in _tracks(events):
                    threads.submit(self._publish_track, publisher, track)

    def take(self, seconds: float) -> list[Result]:
        """What has come since the last time: all that is missing, or what there is after so many seconds."""
        found: list[Result] = []
        until = time.monotonic() + seconds
        while len(found) < len(self.waiting):
            try:
                found += self._results.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
        self.waiting -= {result.event.id for result in found}
        return found

    def _say(self, event: Claimed, outcome: str, error: str | None = None) -> None:
        self._results.put([Result(event, outcome, error)])

    def _begins(self, event: Claimed) -> bool:
        """Whether the event may be sent now; if not, says what becomes of it."""
        if time.monotonic() >= self.deadline:
            self._say(event, "lost")  # another relay may have it by now
        elif event.destination in self.down:
            self._say(event, "released", self.down[event.destination])
        elif self._stopping():
            self._say(event, "released")
        else:
            return True
        return False

    def _publish_track(self, publisher: Publisher, track: Sequence[Claimed]) -> None:
        """In order; after the first that did not arrive the rest is given back.

        So it is after one that was refused, too: its key goes on when its death is written down, and not before. Else a
        relay that dies in between would let a later event overtake it.
        """
        for place, event in enumerate(track):
            if not self._begins(event) or not self._attempt(publisher, event):
                for later in track[place + 1 :]:
                    self._say(later, "lost" if time.monotonic() >= self.deadline else "released")
                return

    def _attempt(self, publisher: Publisher, event: Claimed) -> bool:
        """One attempt for one event. True if it has arrived."""
        try:
            publisher.publish(event)
        except PublisherUnavailable as error:
            self._unavailable(event.destination, error)
            self._say(event, "released", str(error))
        except PublishRefused as error:
            self._say(event, "dead", str(error))
        except BaseException as error:  # sys.exit() too: the relay waits for a word about each event
            self._say(event, "failed", _described(error))
        else:
            self._say(event, "published")
            return True
        return False

    def _unavailable(self, destination: str, error: Exception) -> None:
        with self._guard:
            self.down.setdefault(destination, str(error))

    def _publish_whole(self, publisher: Publisher, events: Sequence[Claimed]) -> None:
        """All at once; if that fails for another reason than an outage, one by one, to find those that are to blame."""
        if not self._begins(events[0]):
            for later in events[1:]:
                self._say(later, "lost" if time.monotonic() >= self.deadline else "released")
            return
        try:
            publisher.publish_many(events)
        except PublisherUnavailable as error:
            self._unavailable(events[0].destination, error)
            self._results.put([Result(event, "released", str(error)) for event in events])
        except BaseException as error:
            if len(events) == 1:
                self._say(events[0], "dead" if isinstance(error, PublishRefused) else "failed", _described(error))
                return
            for track in _tracks(events):
                self._publish_track(publisher, track)
        else:
            self._results.put([Result(event, "published") for event in events])


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own __str__ fails
        return type(error).__name__


def _tracks(events: Sequence[Claimed]) -> list[list[Claimed]]:
    """The events of a key together, each other one by itself."""
    found: list[list[Claimed]] = []
    of_key: dict[str, list[Claimed]] = {}
    for event in events:
        if event.ordering_key is None:
            found.append([event])
        elif event.ordering_key in of_key:
            of_key[event.ordering_key].append(event)
        else:
            of_key[event.ordering_key] = [event]
            found.append(of_key[event.ordering_key])
    return found
