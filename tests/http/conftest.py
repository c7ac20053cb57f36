"""A real server on a free port of the loopback, in a thread or as a process, and plain HTTP requests to it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.waiting import wait_for

import custody
from custody.http import Server, ServerSettings
from custody.http.state import ServerState


@dataclass(frozen=True, kw_only=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error."""
        return str(self.json["error"]["code"])


class Http:
    """Requests to one server, each on a connection of its own. Without a Content-Type, as curl -d with a bare body."""

    def __init__(self, url: str, state: ServerState | None = None) -> None:
        self.url = url
        self.state = state
        """What a server of this process holds: only to be looked at."""

    def __call__(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = 30,
    ) -> Response:
        """`body` is sent as JSON; bytes are sent as they are."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)
        try:
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Response(status=response.status, headers=found, body=response.read())
        finally:
            connection.close()

    def get(self, path: str, **rest: Any) -> Response:
        return self("GET", path, **rest)

    def post(self, path: str, body: object = None, **rest: Any) -> Response:
        return self("POST", path, {} if body is None else body, **rest)


@contextmanager
def served(engine: custody.Custody, **settings: Any) -> Iterator[Http]:
    """A server in a thread of this process."""
    server = Server(engine, ServerSettings(port=0, **settings))
    failed: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="custody-server")
    thread.start()
    door = Http(server.url, server._state)

    def ready() -> bool:
        assert not failed, failed
        try:
            return door.get("/healthz").status == 200
        except ConnectionError:
            return False

    try:
        wait_for(ready, "the server answers")
        yield door
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"
        assert not failed, failed


@pytest.fixture
def serve(c: custody.Custody) -> Iterator[Callable[..., Http]]:
    """Starts servers on the test's database, with the test's clock, and stops them at the end."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(served(c, **settings))


@pytest.fixture
def http_(serve: Callable[..., Http]) -> Http:
    """One server with the usual settings."""
    return serve()


class Process:
    """A server as a process of its own, to be killed."""

    def __init__(
        self,
        database_url: str,
        *arguments: str,
        cwd: Path,
        environment: dict[str, str] | None = None,
        ready: bool = True,
    ) -> None:
        self.log = cwd / f"server-{os.getpid()}-{id(self)}.log"
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "custody",
                    "--json",
                    "--database",
                    database_url,
                    "serve",
                    "--port",
                    "0",
                    *(() if "--log-format" in arguments else ("--log-format", "json")),
                    *arguments,
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=cwd,
                env={**os.environ, **(environment or {})},
            )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, f"the server did not start: {self.log.read_text()}"
        self.http = Http(json.loads(line)["url"])
        if ready:  # else the test waits, by another way than plain HTTP
            wait_for(self._ready, "the server answers")

    def _ready(self) -> bool:
        try:
            return self.http.get("/healthz").status == 200
        except ConnectionError:
            return False

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)

    def stop(self, timeout: float = 30) -> int:
        """Asks it to stop, and returns its exit code."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        return self.popen.wait(timeout)


@pytest.fixture
def process(database_url: str, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts server processes on the test's database, and stops them at the end."""
    started: list[Process] = []

    def start(*arguments: str, environment: dict[str, str] | None = None) -> Process:
        started.append(Process(database_url, *arguments, cwd=tmp_path, environment=environment))
        return started[-1]

    yield start
    for one in started:
        if one.popen.poll() is None:
            one.popen.kill()
        one.popen.wait(10)
        if one.popen.stdout is not None:
            one.popen.stdout.close()
