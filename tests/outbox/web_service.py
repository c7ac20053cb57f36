"""A web service for events to go to."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """A web service that remembers its requests."""

    def __init__(self) -> None:
        service = self
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.lines: list[list[tuple[str, str]]] = []  # the headers of each request as they came
        self.answers: list[int] = []
        self.default = 204
        self.headers: dict[str, str] = {}  # of each answer
        self.body = b""  # of each answer
        guard = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with guard:
                    service.lines.append(list(self.headers.items()))
                    service.requests.append((self.command, self.path, dict(self.headers.items()), body))
                    status = service.answers.pop(0) if service.answers else service.default
                self.send_response(status)
                for name, value in service.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(service.body)

            do_POST = do_PUT = answer  # the names that http.server calls

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?a=1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
