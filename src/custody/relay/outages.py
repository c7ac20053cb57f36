"""Backoff: between the attempts of an event, and for destinations that are down."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from custody.model.policy import Backoff, Exponential, seconds

MOST_SUSPECTS = 10_000
CHARGED_FROM = 3  # number of outages in which an event failed, and which ended with another event


def delay(backoff: Backoff, failures: int, dice: Callable[[], float] = random.random) -> float:
    """Seconds to wait after this number of failures, which is at least 1."""
    initial, cap = seconds(backoff.initial), seconds(backoff.cap)
    if backoff.kind == "linear":
        wait = initial * failures
    else:
        # 64 steps reach any cap; a larger power could overflow
        wait = initial * backoff.factor ** min(failures - 1, 64)
    return min(wait, cap) * (1 - backoff.jitter * dice())


@dataclass
class _Outage:
    """How often a destination has failed, when it is probed again, and which events were tried."""

    failures: int = 0
    due: float = 0.0
    tried: set[int] = field(default_factory=set)
    last: int = 0
    times: int = 0  # consecutive probes with the last event


class Outages:
    """Destinations that are down, and when each is probed again: with one event, with growing pauses.

    `suspects` are events that failed in several outages, each of which ended with another event: if such an event fails
    in the same way again, it counts as its own failure. The count starts again after each such failure, so that
    occasional outages, or a service that accepts only some of its requests, make no event dead. `lone` are events that
    were the only ones to probe with, and that a running service has refused several times in a row as unavailable.
    """

    def __init__(self, backoff: Backoff | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff or Exponential("500ms", cap="30s", jitter=0.2)
        self._clock = clock
        self._down: dict[str, _Outage] = {}
        self.suspects: set[int] = set()
        self.lone: set[int] = set()
        self._suspicions: Counter[int] = Counter()

    @property
    def down(self) -> list[str]:
        return sorted(self._down)

    def due(self) -> list[str]:
        """Destinations to be probed now, the longest overdue first."""
        due = [(outage.due, name) for name, outage in self._down.items() if outage.due <= self._clock()]
        return [name for _, name in sorted(due)]

    def failed(self, destination: str, retry_after: float | None = None) -> float:
        """Records that a destination is down, or asks for a pause. Returns the seconds until the next probe."""
        outage = self._down.setdefault(destination, _Outage())
        outage.failures += 1
        wait = max(delay(self._backoff, outage.failures), retry_after or 0)
        outage.due = self._clock() + wait
        return wait

    def postpone(self, destination: str, retry_after: float) -> None:
        """Postpones the probe of a destination that asks for a longer pause."""
        outage = self._down[destination]
        outage.due = max(outage.due, self._clock() + retry_after)

    def later(self, destination: str) -> None:
        """Repeats the last pause, because there was no event to probe with."""
        outage = self._down[destination]
        outage.due = self._clock() + delay(self._backoff, max(1, outage.failures))

    def tried(self, destination: str, event: int, *, suspected: bool = True, answered: bool = False) -> None:
        """Records that a probe with this event failed. The next probe takes an event after it."""
        outage = self._down[destination]
        if suspected:
            outage.tried.add(event)
        outage.times = outage.times + 1 if event == outage.last else 1
        outage.last = event
        if answered and outage.tried == {event} and outage.times >= CHARGED_FROM:
            self.lone.add(event)

    def last(self, destination: str) -> int:
        """The event of the last probe; 0 if there was none."""
        return self._down[destination].last

    def over(self, destination: str, event: int | None = None) -> bool:
        """Ends the outage of a destination, which has answered to this event. True if it was down."""
        outage = self._down.pop(destination, None)
        if outage is not None and event is not None and len(self._suspicions) < MOST_SUSPECTS:
            others = outage.tried - {event}
            self._suspicions.update(others)
            self.suspects |= {each for each in others if self._suspicions[each] >= CHARGED_FROM}
        return outage is not None

    def settled(self, event: int) -> None:
        """Clears the suspicion of an event whose outcome is known."""
        self.suspects.discard(event)
        self.lone.discard(event)
        self._suspicions.pop(event, None)
