"""Whether a process lives, and whether it is ready: a database that is down makes it unready, and not dead."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from custody.errors import CustodyError, DatabaseUnavailable, ServerStopping, Stalled
from custody.vitals import Pulse, Vitals

KEPT = 1.0
"""Seconds for which the answer of the database is kept, so that probes are no load for it."""


class Health:
    """The health of what runs in this process: its parts by name. Used by any thread."""

    def __init__(
        self,
        parts: Mapping[str, Vitals],
        *,
        ping: Callable[[], None],
        stopping: Callable[[], bool],
        stalled_after: float,
    ) -> None:
        self._parts, self._ping, self._stopping, self._limit = parts, ping, stopping, stalled_after
        self._guard = threading.Lock()
        self._asked, self._refusal = -math.inf, ""

    def require_alive(self) -> None:
        """Raises if a loop has not turned for longer than it may, or its thread has died."""
        stalled = [
            f"{name}: {_late(pulse)}"
            for name, vitals in self._parts.items()
            for pulse in vitals.pulses
            if pulse.overdue > self._limit
        ]
        if stalled:
            raise Stalled("; ".join(stalled), "Restart the process: what it holds is delivered again.")

    def require_ready(self) -> None:
        """Raises if it is stopping, does not live, or its database does not answer."""
        if self._stopping():
            raise ServerStopping("the process is stopping")
        self.require_alive()
        with self._guard:  # one question at a time: if the database is silent, all wait for the same answer
            if time.monotonic() - self._asked > KEPT:
                self._refusal = self._ask()
                self._asked = time.monotonic()
            if self._refusal:
                raise DatabaseUnavailable(self._refusal, "Its work goes on when the database is back.")

    def _ask(self) -> str:
        try:
            self._ping()
        except CustodyError as error:
            return error.shown
        return ""


def _late(pulse: Pulse) -> str:
    if math.isinf(pulse.overdue):
        return f"the thread for {pulse.name} has died"
    return f"{pulse.name} has not gone on for {pulse.overdue:.0f} s"
