"""What a running loop shows for monitoring: signs of life, counts and durations. Any thread may read them."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, math.inf)
"""Upper bounds of durations in seconds, up to the longest handlers that are usual."""


class Durations:
    """How many durations were at most as long as each of BOUNDS."""

    def __init__(self) -> None:
        self._counts = [0] * len(BOUNDS)
        self._sum = 0.0
        self._guard = threading.Lock()

    def add(self, seconds: float) -> None:
        place = bisect_left(BOUNDS, seconds)
        with self._guard:
            self._counts[place] += 1
            self._sum += seconds

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Adds the duration of the block, also if it raises."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(time.monotonic() - began)

    def cumulated(self) -> tuple[list[int], float]:
        """For each bound the number of durations up to it, and the sum of all."""
        with self._guard:
            return [*accumulate(self._counts)], self._sum


class Pulse:
    """When a loop last turned. It beats at each turn, and says how long it may wait then."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._due = math.inf
        self._thread: threading.Thread | None = None

    def beat(self, *, waits: float = 0.0) -> None:
        """The loop turns; it waits for at most so many seconds before it does its next work."""
        self._thread, self._due = threading.current_thread(), time.monotonic() + waits

    def end(self) -> None:
        """The loop has ended as it should."""
        self._thread, self._due = None, math.inf

    @property
    def overdue(self) -> float:
        """For how many seconds it has not turned although it does not wait; infinite if its thread has died."""
        if self._thread is not None and not self._thread.is_alive():
            return math.inf
        return max(0.0, time.monotonic() - self._due)


@dataclass(frozen=True, kw_only=True)
class Running:
    """Calls that run now: of a handler, of a publisher, or the batch of a pipeline."""

    count: int
    oldest: float
    """How long the oldest one has been running, in seconds."""

    @classmethod
    def since(cls, begun: Sequence[float]) -> Running:
        """Of calls that began at these times of `time.monotonic`."""
        return cls(count=len(begun), oldest=max(0.0, time.monotonic() - min(begun)) if begun else 0.0)


class Vitals:
    """The signs of life and the counts of one worker, relay or pipeline."""

    def __init__(self, *loops: str) -> None:
        self.pulses = tuple(map(Pulse, loops))
        self.took = Durations()
        """How long calls took."""
        self.claimed_at: float | None = None
        """When it last got something to do, as a Unix time."""
        self.received = self.redelivered = self.leases_lost = 0
        self.outcomes: Counter[str] = Counter()
        self.began: float | None = None
        """Of a pipeline: when its running batch began, by `time.monotonic`."""

    def claimed(self, messages: int, redelivered: int = 0) -> None:
        self.claimed_at = time.time()
        self.received += messages
        self.redelivered += redelivered
