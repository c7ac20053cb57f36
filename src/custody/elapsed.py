"""The clock by which a process judges how long it has held something.

It never goes back, and it goes on while the machine is suspended: a lease runs out in the meantime.
"""

from __future__ import annotations

import sys
import time

_CLOCK = time.CLOCK_BOOTTIME if sys.platform == "linux" else getattr(time, "CLOCK_MONOTONIC", None)
# Python's own monotonic clock stands still during a suspend, on Linux and on macOS

LONGEST_MARGIN = 1.0


def elapsed() -> float:
    """Seconds since some moment in the past."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


def margin(visibility: float) -> float:
    """So many seconds before its deadline a lease counts as over: clocks differ in their rate, and what was checked has
    yet to begin."""
    return min(LONGEST_MARGIN, visibility / 20)


def holds_until(sent: float, visibility: float) -> float:
    """Until when, by `elapsed`, a lease surely holds that was asked for (claimed or extended) at `sent`."""
    return sent + visibility - margin(visibility)
