"""Waiting: between the attempts for an event, and for a destination that is down."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from custody.model.policy import Backoff, Exponential, seconds

MOST_SUSPECTS = 10_000
CHARGED_FROM = 3  # outages, in which an event did not arrive and after which another one did


def delay(backoff: Backoff, failures: int, dice: Callable[[], float] = random.random) -> float:
    """Seconds to wait after so many failures (from 1 on)."""
    initial, cap = seconds(backoff.initial), seconds(backoff.cap)
    if backoff.kind == "linear":
        wait = initial * failures
    else:
        # beyond this many doublings any cap is reached; the power itself would overflow
        wait = initial * backoff.factor ** min(failures - 1, 64)
    return min(wait, cap) * (1 - backoff.jitter * dice())


@dataclass
class _Outage:
    """How often a destination has failed, when it is tried again, and which events were tried so far."""

    failures: int = 0
    due: float = 0.0
    tried: set[int] = field(default_factory=set)
    last: int = 0
    times: int = 0  # in a row with the last one


class Outages:
    """Which destinations are down, and when each is tried again: with one event, less and less often.

    `suspects` are events that did not arrive in several outages each of which ended with another one: if they meet the
    same again, it is their own fault. Counted anew after each charge, so that an outage now and then, or a service that
    takes only some of what comes at once, makes no event dead. `lone` are events that were the only ones to be had, and
    to which a service that is there has said several times in a row that it takes nothing.
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
        """Those to be tried now; the one that waits longest first."""
        due = [(outage.due, name) for name, outage in self._down.items() if outage.due <= self._clock()]
        return [name for _, name in sorted(due)]

    def failed(self, destination: str, retry_after: float | None = None) -> float:
        """It cannot be reached, or wants to be left alone. Returns in how many seconds it is tried again."""
        outage = self._down.setdefault(destination, _Outage())
        outage.failures += 1
        wait = max(delay(self._backoff, outage.failures), retry_after or 0)
        outage.due = self._clock() + wait
        return wait

    def postpone(self, destination: str, retry_after: float) -> None:
        """It is down, and has said once more for how long it wants to be left alone."""
        outage = self._down[destination]
        outage.due = max(outage.due, self._clock() + retry_after)

    def later(self, destination: str) -> None:
        """There was no event to try it with now. It is tried after the same time again."""
        outage = self._down[destination]
        outage.due = self._clock() + delay(self._backoff, max(1, outage.failures))

    def tried(self, destination: str, event: int, *, suspected: bool = True, answered: bool = False) -> None:
        """This event, by itself, did not arrive. The next is tried with one behind it."""
        outage = self._down[destination]
        if suspected:
            outage.tried.add(event)
        outage.times = outage.times + 1 if event == outage.last else 1
        outage.last = event
        if answered and outage.tried == {event} and outage.times >= CHARGED_FROM:
            self.lone.add(event)

    def last(self, destination: str) -> int:
        """The event with which it was tried last; 0 if there was none."""
        return self._down[destination].last

    def over(self, destination: str, event: int | None = None) -> bool:
        """It has answered, to this event. True if it was down."""
        outage = self._down.pop(destination, None)
        if outage is not None and event is not None and len(self._suspicions) < MOST_SUSPECTS:
            others = outage.tried - {event}
            self._suspicions.update(others)
            self.suspects |= {each for each in others if self._suspicions[each] >= CHARGED_FROM}
        return outage is not None

    def settled(self, event: int) -> None:
        """What came of it is known: it is no longer suspected."""
        self.suspects.discard(event)
        self.lone.discard(event)
        self._suspicions.pop(event, None)
