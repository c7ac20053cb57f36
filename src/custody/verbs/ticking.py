"""The thread of a client that publishes the ticks of schedules while workers or a server run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from custody.errors import CustodyError

logger = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds after which it asks again: for schedules that were made or changed meanwhile."""
BUSY = 0.1
"""Seconds to wait while another process publishes what is due."""


class Ticker:
    """Calls `tick`, which returns the seconds until the next one, from one thread for all who run within `running`."""

    def __init__(self, tick: Callable[[], float | None]) -> None:
        self._tick = tick
        self._guard = threading.Lock()
        self._users = 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._guard:
            self._users += 1
            if self._users == 1:
                self._ended = threading.Event()
                self._thread = threading.Thread(target=self._run, args=[self._ended], name="custody-ticks", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._guard:
                self._users -= 1
                if self._users == 0:
                    assert self._thread is not None
                    self._ended.set()
                    self._thread.join(1)  # it may be waiting for a database that is down

    def _run(self, ended: threading.Event) -> None:
        said, pause = "", 0.0
        while not ended.wait(pause):
            pause = AGAIN
            try:
                due = self._tick()
                said = ""
                if due is not None:
                    pause = min(AGAIN, due if due > 0 else BUSY)
            except CustodyError as error:
                if str(error) != said and not ended.is_set():  # not every second
                    logger.warning("ticks of schedules are postponed: %s", error)
                said = str(error)
            except Exception as error:
                if str(error) != said and not ended.is_set():
                    logger.exception("ticks of schedules failed")
                said = str(error)
