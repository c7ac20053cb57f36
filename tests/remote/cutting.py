"""A proxy before a server that loses, holds or delays what it is told to: a request, or the answer to one."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

When = Literal["before", "after", "late"]
"""`late`: the server gets the request only when the test says so, long after the client has lost its connection."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What becomes of one request: it is lost before or after the server had it, or gets another answer instead."""

    when: When = "before"
    answer: tuple[int, bytes] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    then: Callable[[], object] | None = None
    held: threading.Event | None = None


class Proxy:
    """Passes requests on, but for the next ones whose method and path begin so."""

    def __init__(self, url: str) -> None:
        proxy = self
        target = urlsplit(url).netloc
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self._cuts: list[tuple[str, Cut]] = []
        self._holds: list[threading.Event] = []
        self._late: list[Callable[[], int]] = []
        self._lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                cut = proxy._next(self.command, self.path, dict(self.headers.items()))
                if cut is not None and cut.held is not None:
                    cut.held.wait()
                    cut = None
                if cut is not None and cut.answer is not None and cut.when == "before":
                    self._answer(*cut.answer, cut.headers)
                    return
                if cut is None:
                    try:
                        self._answer(*self._ask(body))
                    except ConnectionError:  # one of the two may have gone while it was held
                        self.close_connection = True
                    return
                if cut.when == "after":
                    self._ask(body)
                if cut.when == "late":
                    proxy._late.append(lambda: self._ask(body)[0])
                if cut.answer is not None:
                    self._answer(*cut.answer, cut.headers)
                    return
                if cut.then is not None:
                    cut.then()
                self.close_connection = True

            def _ask(self, body: bytes) -> tuple[int, bytes]:
                with closing(http.client.HTTPConnection(target, timeout=30)) as connection:
                    connection.request(self.command, self.path, body or None, self._passed())
                    response = connection.getresponse()
                    return response.status, response.read()

            def _passed(self) -> dict[str, str]:
                return {name: value for name, value in self.headers.items() if name.lower() != "host"}

            def _answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = pass_on  # the names that http.server calls

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def _next(self, method: str, path: str, headers: dict[str, str]) -> Cut | None:
        with self._lock:
            self.requests.append((method, path, headers))
            if self._cuts and f"{method} {path}".startswith(self._cuts[0][0]):
                return self._cuts.pop(0)[1]
        return None

    def lose(self, what: str, when: When, *, times: int = 1, then: Callable[[], object] | None = None) -> None:
        """Loses the next requests of this kind (`POST /messages`) or, after the server had them, their answers."""
        with self._lock:
            self._cuts += [(what, Cut(when=when, then=then))] * times

    def answer(
        self,
        what: str,
        status: int,
        body: bytes,
        *,
        times: int = 1,
        when: When = "before",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answers the next requests of this kind itself; `after`: the server has had them."""
        with self._lock:
            self._cuts += [(what, Cut(when=when, answer=(status, body), headers=headers or {}))] * times

    def hold(self, what: str) -> threading.Event:
        """Keeps the next request of this kind, as a server that hangs, until the event is set."""
        held = threading.Event()
        with self._lock:
            self._holds.append(held)
            self._cuts.append((what, Cut(held=held)))
        return held

    def deliver(self) -> list[int]:
        """Passes on what was to come late, and says how the server answered."""
        late, self._late = self._late, []
        return [ask() for ask in late]

    @property
    def waiting(self) -> int:
        """How many cuts are still to come."""
        with self._lock:
            return len(self._cuts)

    def clear(self) -> None:
        with self._lock:
            self._cuts.clear()

    def count(self, what: str) -> int:
        """How many requests of this kind have come."""
        with self._lock:
            return sum(f"{method} {path}".startswith(what) for method, path, _ in self.requests)

    def close(self) -> None:
        for held in self._holds:
            held.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
