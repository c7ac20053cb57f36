"""The Custody of a process: opened when it is first needed, and closed when the process ends."""

from __future__ import annotations

import atexit
import threading

import custody
from custody.django.configuration import configuration
from custody.engine import Custody
from custody.forking import reset_after_fork


class _Client:
    """At most one open Custody, with the URL that it was opened for."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._opened: tuple[str, Custody] | None = None
        self._inherited: list[object] = []

    def get(self) -> Custody:
        found = configuration()
        url = found.url
        with self._guard:
            if self._opened is not None and self._opened[0] != url:  # Django's test runner has made a test database
                self._close()
            if self._opened is None:
                self._opened = url, custody.connect(url, **found.arguments())
            return self._opened[1]

    def close(self) -> None:
        with self._guard:
            self._close()

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened[1].close()

    def forked(self) -> None:
        """In the child: the sockets and threads are the parent's. They are neither used nor closed here."""
        if self._opened is not None:
            self._inherited.append(self._opened)
        self._guard, self._opened = threading.Lock(), None


_client = _Client()
reset_after_fork(_client)
atexit.register(_client.close)


def client() -> Custody:
    """The Custody of this process, on the database of the setting `CUSTODY`. All threads share it; do not close it.

    It is opened by the first call, also after a fork, and closed when the process ends. Like `custody.connect`, it
    creates the schema if that is missing, and refuses a schema of another version.
    """
    return _client.get()


def close() -> None:
    """Closes the Custody of this process, if it is open. The next `client()` opens another one."""
    _client.close()
