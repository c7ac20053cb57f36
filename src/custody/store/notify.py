"""Wake-ups: hints that a topic has news. They only save waiting; whoever misses one finds out by polling.

A hint is sent by a thread of its own after the producer's commit: NOTIFY inside the producer's transaction would make
all committers queue for one lock. Hints that come faster than `INTERVAL` are sent as one.
"""

from __future__ import annotations

import logging
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
    """Sends hints; starts its thread and connection with the first one."""

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
        """What was sent before is still on its way when this begins, and sent when it returns, if it can be."""
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
                logger.debug("no hints can be sent, consumers will poll: %s", error)
                if self._closed.wait(RECONNECT):
                    return

    def _send_all(self, connection: BoundedConnection) -> None:
        """Until it is closed; what came before that is sent."""
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
    """Calls `wake` with the topic of each hint for it (for any topic, if none is named), from a thread of its own; with
    None after a time in which nobody listened.

    Behind a pooler there is no session that could listen: nothing is heard, and whoever waits polls.
    """

    def __init__(self, url: str, topic: str | None, wake: Callable[[str | None], None]) -> None:
        self._url = url
        self._topic = topic
        self._wake = wake
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="custody-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with BoundedConnection.connect(
                    self._url, autocommit=True, application_name="custody listener"
                ) as connection:
                    if connection.pooled:
                        logger.info("a connection pooler is in between: polling instead of listening (see listen_url)")
                        return
                    connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(CHANNEL)))
                    self._wake(None)  # what came while nobody listened
                    while not self._closed.is_set():
                        for hint in connection.notifies(timeout=0.1, stop_after=1):
                            if self._topic is None or hint.payload == self._topic:
                                self._wake(hint.payload)
            except psycopg.Error as error:
                logger.debug("no hints can be heard, polling instead: %s", error)
                self._closed.wait(RECONNECT)


def hears(db: Database, listen_url: str) -> bool:
    """Whether a notification of this database arrives at whoever listens on that URL."""
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
