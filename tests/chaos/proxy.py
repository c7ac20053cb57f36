"""A proxy that cuts a connection at a chosen request, before PostgreSQL has it or after it answered; that cuts off the
database as a whole; or that accepts everything and forwards nothing."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Literal
from urllib.parse import quote

from psycopg.conninfo import conninfo_to_dict

When = Literal["before", "after"]
TERMINATE = b"X"
POOLED = b"application_name\0custody\0"
"""In the first message of a connection on which verbs run; hints have connections of their own."""


class Proxy:
    """Passes everything on until it is armed; then it counts what the client sends, and cuts once."""

    def __init__(self, url: str) -> None:
        self._target = conninfo_to_dict(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self._lock = threading.Lock()
        self._armed: tuple[int, When] | None = None
        self._open: set[socket.socket] = set()
        self._watched: set[socket.socket] = set()
        self._severed, self._silent, self._holding = threading.Event(), threading.Event(), threading.Event()
        self._trigger: tuple[bytes, threading.Event] | None = None
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self.cuts = 0
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def url(self) -> str:
        login = str(self._target.get("user") or "postgres")
        if self._target.get("password"):
            login += f":{quote(str(self._target['password']))}"
        port = self._listener.getsockname()[1]
        return f"postgresql://{login}@127.0.0.1:{port}/{self._target['dbname']}?sslmode=disable&gssencmode=disable"

    def cut(self, request: int, when: When) -> None:
        """Cuts at that request of a verb, counted from 0 from now on over the connections that are open now."""
        with self._lock:
            self._armed = (request, when)
            self._watched = set(self._open)

    def sever(self) -> None:
        """Cuts every connection, and each new one, until `mend`."""
        self._severed.set()

    def silence(self) -> None:
        """Connections stay, and new ones are accepted, but nothing is forwarded in either direction until `mend`."""
        self._silent.set()

    def silence_at(self, words: bytes, *, alone: bool = False) -> None:
        """Silent from the moment when a client sends these words; `alone`: on its connection only."""
        self._trigger = (words, self._holding if alone else self._silent)

    def mend(self) -> None:
        self._trigger = None
        for event in (self._severed, self._silent, self._holding):
            event.clear()

    def disarm(self) -> bool:
        """Whether it was still waiting to cut."""
        with self._lock:
            was, self._armed = self._armed, None
            return was is not None

    def close(self) -> None:
        self._closing.set()
        self._accepting.join()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _connect(self) -> socket.socket:
        host, port = str(self._target.get("host") or "127.0.0.1"), int(self._target.get("port") or 5432)
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.connect(f"{host}/.s.PGSQL.{port}")
        return server

    def _accept(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._pass_on, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, client: socket.socket) -> None:
        try:
            self._relay(client)
        finally:
            with self._lock:
                self._open.discard(client)

    def _relay(self, client: socket.socket) -> None:
        cutting = False
        with client, self._connect() as server, contextlib.suppress(OSError):
            while not self._closing.is_set() and not self._severed.is_set():
                if self._silent.is_set():
                    self._closing.wait(0.01)
                    continue
                readable, _, _ = select.select([client, server], [], [], 0.05)
                if self._silent.is_set():
                    continue
                for source in readable:
                    data = source.recv(1 << 20)
                    if not data:
                        return
                    if POOLED in data and source is client:
                        with self._lock:
                            self._open.add(client)
                    if source is server:
                        if cutting:
                            return  # the server has done it, and the client never hears of it
                        client.sendall(data)
                        continue
                    self._hold(data)
                    when = None if data[:1] == TERMINATE else self._due(client)
                    if when == "before":
                        return
                    cutting = cutting or when == "after"
                    server.sendall(data)

    def _hold(self, request: bytes) -> None:
        """Keeps back the request at which silence begins until it ends."""
        if self._trigger is not None and self._trigger[0] in request:
            silent = self._trigger[1]
            silent.set()
            while silent.is_set() and not self._closing.is_set():
                self._closing.wait(0.01)

    def _due(self, client: socket.socket) -> When | None:
        with self._lock:
            if self._armed is None or client not in self._watched:
                return None
            left, when = self._armed
            if left > 0:
                self._armed = (left - 1, when)
                return None
            self._armed = None
            self.cuts += 1
            return when
