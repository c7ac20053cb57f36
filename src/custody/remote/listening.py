"""Hearing of news over HTTP: a long poll in a thread, in place of a connection that listens."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from custody.errors import CustodyError
from custody.wire.answers import NewsOut

logger = logging.getLogger(__name__)

WAIT = 10.0
FIRST_PAUSE = 0.02
PAUSE = 1.0


class RemoteListener:
    """Calls `wake` when something was published, and when something may have been while nobody listened."""

    def __init__(self, ask: Callable[[str | None, float], NewsOut], wake: Callable[[], None]) -> None:
        self._ask, self._wake = ask, wake
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="custody-listener", daemon=True).start()

    def close(self) -> None:
        """Nothing is called any more. The poll that is under way ends by itself, and is not waited for."""
        self._closed.set()

    def _run(self) -> None:
        token: str | None = None
        pause = 0.0
        while not self._closed.is_set():
            asked = time.monotonic()
            try:
                answer = self._ask(token, WAIT)
            except CustodyError as error:
                logger.debug("no hints can be heard, polling instead: %s", error)
                token = None
                self._closed.wait(PAUSE * random.uniform(0.5, 1))
                continue
            if answer.news and not self._closed.is_set():
                self._wake()
            if token is not None:
                waited = time.monotonic() - asked > WAIT / 2
                if waited or (answer.news and _server(token) == _server(answer.token)):
                    pause = 0.0
                else:
                    # at once, and nothing was heard: a server that is about to stop, or several that take turns and do
                    # not know each other's tokens
                    pause = min(max(2 * pause, FIRST_PAUSE), PAUSE)
                    self._closed.wait(pause)
            token = answer.token


def _server(token: str) -> str:
    """The run of a server that gave a token: its first part."""
    return token.partition("-")[0]
