"""Wake-ups: hints that something was published in a topic. They only save time: who misses one finds out by polling.

A thread sends hints after the producer's commit: NOTIFY inside the producer's transaction would make all commits queue
for one lock. Hints within `INTERVAL` seconds are sent as one.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from uuid import uuid4

import psycopg

from custody.store.connecting import BoundedConnection
from custody.store.postgres import Database, translated

logger = logging.getLogger(__name__)

CHANNEL = "custody"
INTERVAL = 0.003
RECONNECT = 1.0
HEARD_WITHIN = 2.0


class Hints:
    """Sends hints. Starts its thread and connection with the first one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._topics: set[str] = set()
        self._some = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def send(self, topic: str) -> None:
        with self._lock:
            self._topics.add(topic)
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="custody-hints", daemon=True)
                self._thread.start()
        self._some.set()

    def close(self) -> None:
        """Sends the pending hints, for at most 5 s, and ends the thread."""
        self._closed.set()
        self._some.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            try:
                with BoundedConnection.connect(
                    self._url, autocommit=True, application_name="custody hints"
                ) as connection:
                    self._send_all(connection)
                    return
            except psycopg.Error as error:
                logger.debug("wake-ups cannot be sent, consumers will poll: %s", error)
                if self._closed.wait(RECONNECT):
                    return

    def _send_all(self, connection: BoundedConnection) -> None:
        """Sends hints until it is closed, including those that came before that."""
        while True:
            self._some.wait()
            self._some.clear()
            with self._lock:
                topics, self._topics = self._topics, set()
            for topic in topics:
                connection.execute("SELECT pg_notify(%s, %s)", [CHANNEL, topic])
            if self._closed.wait(INTERVAL):
                return


class Listener:
    """Calls `wake`, from a thread of its own, with the topic of each hint (only of `topic`, if given), and with None
    after a time in which it could not listen.

    Behind a pooler there is no session that could listen, so consumers poll.
    """

    def __init__(self, url: str, topic: str | None, wake: Callable[[str | None], None]) -> None:
        self._url = url
        self._topic = topic
        self._wake = wake
        self._closed = threading.Event()
        self._closer, self._closing = socket.socketpair()  # the second is readable when the first is closed
        self._thread = threading.Thread(target=self._run, name="custody-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._closer.close()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        with self._closing:
            while not self._closed.is_set():
                try:
                    with BoundedConnection.connect(
                        self._url, autocommit=True, application_name="custody listener"
                    ) as connection:
                        if connection.pooled:
                            logger.info("there is a connection pooler: polling instead of listening (see listen_url)")
                            return
                        connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(CHANNEL)))
                        self._wake(None)  # something may have come before it listened
                        self._listen(connection)
                except psycopg.Error as error:
                    logger.debug("wake-ups cannot be received, polling instead: %s", error)
                    self._closed.wait(RECONNECT)

    def _listen(self, connection: BoundedConnection) -> None:
        """Reads hints until it is closed. Nothing is done while there are none."""
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._closing, selectors.EVENT_READ)
            while not self._closed.is_set():
                for hint in connection.notifies(timeout=0):
                    if self._topic is None or hint.payload == self._topic:
                        self._wake(hint.payload)
                selector.select()


class Listening:
    """One listener for all workers of a client: it takes a connection only once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._guard = threading.Lock()
        self._waiting: dict[object, tuple[str, Callable[[], None]]] = {}
        self._listener: Listener | None = None

    def add(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls `wake` for each hint of the topic, until the returned function is called."""
        place = object()
        with self._guard:
            self._waiting[place] = topic, wake
            if self._listener is None:
                self._listener = Listener(self._url, None, self._hear)

        def remove() -> None:
            with self._guard:
                self._waiting.pop(place, None)
                ended = None if self._waiting else self._listener
                if ended is not None:
                    self._listener = None
            if ended is not None:
                ended.close()

        return remove

    def close(self) -> None:
        """Ends all calls of `wake`."""
        with self._guard:
            self._waiting.clear()
            ended, self._listener = self._listener, None
        if ended is not None:
            ended.close()

    def _hear(self, topic: str | None) -> None:
        with self._guard:
            wakes = [wake for named, wake in self._waiting.values() if topic in (None, named)]
        for wake in wakes:
            wake()


def can_listen(db: Database, listen_url: str) -> bool:
    """Whether a notification of this database arrives at a listener on that URL."""
    sent = uuid4().hex
    with translated(), BoundedConnection.connect(listen_url, autocommit=True, application_name="custody") as listening:
        if listening.pooled:
            return False
        listening.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(CHANNEL)))
        with db.connection() as connection:
            connection.execute("SELECT pg_notify(%s, %s)", [CHANNEL, sent])
        until = time.monotonic() + HEARD_WITHIN
        while (left := until - time.monotonic()) > 0:
            if any(hint.payload == sent for hint in listening.notifies(timeout=left, stop_after=1)):
                return True
        return False
