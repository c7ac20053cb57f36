"""The clock by which a process measures how long it has held a lease.

It never goes back, and it counts the time of a suspend, because a lease expires during one too.
"""

from __future__ import annotations

import sys
import time

_CLOCK = time.CLOCK_BOOTTIME if sys.platform == "linux" else getattr(time, "CLOCK_MONOTONIC", None)
# time.monotonic() stands still during a suspend, on Linux and on macOS

LONGEST_MARGIN = 1.0


def elapsed() -> float:
    """Seconds since some moment in the past."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def margin(visibility: float) -> float:
    """Seconds before its deadline at which a lease counts as expired: clocks differ in rate, and work begins a moment
    after the check."""
    return min(LONGEST_MARGIN, visibility / 20)


def holds_until(sent: float, visibility: float) -> float:
    """The time, by `elapsed`, until which a lease is certainly held if it was claimed or extended at `sent`."""
    return sent + visibility - margin(visibility)
