"""Wake-ups over HTTP: a long poll in the background, in place of a database connection that listens."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from custody import bridge
from custody.errors import CustodyError
from custody.wire.answers import WakeupOut

logger = logging.getLogger(__name__)

WAIT = 10.0
"""Seconds of one long poll."""
FIRST_PAUSE = 0.02
PAUSE = 1.0
"""Longest pause in seconds before the next poll."""


class RemoteListener:
    """Calls `wake` when something was published, or may have been while it could not listen."""

    def __init__(self, ask: Callable[[str | None, float], WakeupOut], wake: Callable[[], None]) -> None:
        self._ask, self._wake = ask, wake
        self._closed = bridge.event()
        self._cancel = bridge.start(self._run, name="custody-listener")

    def close(self) -> None:
        """Ends the calls of `wake`. Does not wait for the poll that is under way."""
        self._closed.set()
        self._cancel()

    def _run(self) -> None:
        token: str | None = None
        pause = 0.0
        while not self._closed.is_set():
            asked = time.monotonic()
            try:
                answer = self._ask(token, WAIT)
            except CustodyError as error:
                logger.debug("no wake-ups from the server, polling instead: %s", error)
                token = None
                self._closed.wait(PAUSE * random.uniform(0.5, 1))
                continue
            if answer.woken and not self._closed.is_set():
                self._wake()
            if token is not None:
                waited = time.monotonic() - asked > WAIT / 2
                if waited or (answer.woken and _server(token) == _server(answer.token)):
                    pause = 0.0
                else:
                    # answered at once without a wake-up: the server is stopping, or several servers behind one address
                    # do not know each other's tokens
                    pause = min(max(2 * pause, FIRST_PAUSE), PAUSE)
                    self._closed.wait(pause)
            token = answer.token


def _server(token: str) -> str:
    """The first part of a token, which identifies the run of a server."""
    return token.partition("-")[0]
