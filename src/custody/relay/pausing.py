"""Waiting: between the attempts for an event, and for a destination that is down."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from custody.policy import Backoff, Exponential, seconds


def delay(backoff: Backoff, failures: int, dice: Callable[[], float] = random.random) -> float:
    """Seconds to wait after so many failures (from 1 on)."""
    settings = backoff.columns()
    initial, cap = seconds(backoff.initial), float(str(settings["backoff_cap"]).removesuffix(" s"))
    if backoff.kind == "linear":
        wait = initial * failures
    else:
        # beyond this many doublings any cap is reached; the power itself would overflow
        wait = initial * backoff.factor ** min(failures - 1, 64)
    return min(wait, cap) * (1 - backoff.jitter * dice())


class Outages:
    """Which destinations are down, and when each is tried again: with one event, less and less often."""

    def __init__(self, backoff: Backoff | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoff = backoff or Exponential("500ms", cap="30s", jitter=0.2)
        self._clock = clock
        self._down: dict[str, tuple[int, float]] = {}

    @property
    def down(self) -> list[str]:
        return sorted(self._down)

    def due(self) -> list[str]:
        """Those to be tried now."""
        return [name for name, (_, at) in sorted(self._down.items()) if at <= self._clock()]

    def failed(self, destination: str) -> float:
        """It cannot be reached. Returns in how many seconds it is tried again."""
        times = self._down.get(destination, (0, 0.0))[0] + 1
        wait = delay(self._backoff, times)
        self._down[destination] = (times, self._clock() + wait)
        return wait

    def over(self, destination: str) -> bool:
        """It has answered. True if it was down."""
        return self._down.pop(destination, None) is not None
