"""Answers GET requests for a few paths on a port, in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, socket
from typing import Any

import msgspec

from custody.errors import CustodyError, InvalidArgument

JSON = "application/json"
TIMEOUT = 5.0
"""Seconds for a request to arrive and its answer to be read."""
AT_ONCE = 16
"""Connections at a time; more are closed at once."""

Page = Callable[[], tuple[bytes, str]]
"""Makes a body and its content type."""


@contextmanager
def answering(host: str, port: int, pages: Mapping[str, Page]) -> Iterator[int]:
    """Answers while the block runs. Gives the port, which the system chooses for port 0."""
    try:
        server = _Server(host, port, pages)
    except (OSError, OverflowError) as error:
        raise InvalidArgument(f"port {port} of {host} cannot be used: {error}", "Choose another one.") from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="custody-monitoring")
    thread.daemon = True
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def health_page(require: Callable[[], None], status: str) -> Page:
    """A page that says the status, or refuses as `require` does. In the form of `custody serve`."""

    def page() -> tuple[bytes, str]:
        require()
        return msgspec.json.encode({"status": status}), JSON

    return page


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that reads slowly does not delay the end

    def __init__(self, host: str, port: int, pages: Mapping[str, Page]) -> None:
        self.pages = pages
        self._room = threading.Semaphore(AT_ONCE)
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, port), _Request)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """The client has gone, or was too slow: nothing to report."""


class _Request(BaseHTTPRequestHandler):
    timeout = TIMEOUT
    server: _Server

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self._refuse(404, "no_such_path", "there is no such path", f"There are: {', '.join(self.server.pages)}")
            return
        try:
            body, kind = page()
        except CustodyError as error:
            self._refuse(error.status, error.code, error.shown, error.remedy)
        else:
            self._answer(200, body, kind)

    def _refuse(self, status: int, code: str, message: str, remedy: str) -> None:
        error = {"code": code, "message": message, "remedy": remedy}
        self._answer(status, msgspec.json.encode({"error": error}), JSON)

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Probes are not logged."""
