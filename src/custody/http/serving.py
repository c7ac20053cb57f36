"""Runs the server: socket, TLS, signals, and a graceful stop."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FrameType

import uvicorn

from custody.engine import Custody
from custody.errors import InvalidConfig, KeysNeeded
from custody.http.app import Application
from custody.http.protocol import bounded
from custody.http.state import ServerState
from custody.model.policy import seconds
from custody.model.server_settings import ServerSettings

__all__ = ["Server", "serve"]

logger = logging.getLogger(__name__)

REMEDY = "Make one with `custody apikeys create NAME --admin '*'`, or serve on 127.0.0.1."
BACKLOG = 2048
OTHER_FILES = 100
"""Open files of a server in addition to connections: libraries, listening sockets, the log."""


class Server:
    """The HTTP server of an engine. `run` serves until a signal or `stop` ends it."""

    def __init__(self, engine: Custody, settings: ServerSettings) -> None:
        self._settings = settings = with_room(settings)
        self._state = ServerState(engine, settings)
        context = tls_context(settings)
        self._require_keys()
        self._socket = bound(settings)
        config = uvicorn.Config(
            Application(self._state),
            http=bounded(
                self._state.connections,
                head_timeout=seconds(settings.body_timeout),
                context=context,
            ),
            # uvloop cannot start TLS on a connection that has not been read from
            loop="auto" if context is None else "asyncio",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=max(1, round(seconds(settings.grace))),
            backlog=BACKLOG,
        )
        self._server = _Uvicorn(config, self._state.stop)

    def _require_keys(self) -> None:
        """Refuses to serve without keys if other machines can reach the server."""
        ring = self._state.keys.load()
        if self._settings.loopback:
            if ring.all_revoked and not self._settings.open:
                raise KeysNeeded(
                    "all API keys of this database are revoked",
                    "Make one with `custody apikeys create NAME --admin '*'`, or use --open to serve without keys.",
                )
            return
        where = f"{self._settings.host} can be reached from other machines"
        if not ring.active:
            raise KeysNeeded(f"{where}, and there is no API key", REMEDY)
        if self._settings.tls_cert is None:
            logger.warning(
                "%s, and keys and messages are sent without encryption. Give --tls-cert and --tls-key", where
            )

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"{self._settings.scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Serves until it is stopped. Then it accepts no new requests, ends long polls, and answers the requests that
        it has accepted."""
        self._server.run(sockets=[self._socket])
        if not self._server.started:
            raise InvalidConfig("the server did not start", "See its log for the reason.")

    def stop(self) -> None:
        """Stops the server as a signal would. Called from another thread."""
        self._server.end()


class _Uvicorn(uvicorn.Server):
    """Ends long polls as soon as a stop is requested. uvicorn itself would wait for them, and checks for a stop only at
    intervals."""

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = threading.Event()
        self._told = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._ended.is_set():
            return
        await super().serve(sockets)

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # each second it updates the Date header of answers
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await asyncio.sleep(0)  # for connections that were accepted just now
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        # as uvicorn's own shutdown, without its pauses, as no connection is left
        for sock in sockets or []:
            sock.close()
        await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        # uvicorn's own handler would raise the signal again at the end, but a requested stop is a success
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self._tell()

    def end(self) -> None:
        self._ended.set()
        self.should_exit = True
        self._tell()

    def _tell(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop_now)

    def _stop_now(self) -> None:
        self._told.set()
        self._stopping()


def bound(settings: ServerSettings) -> socket.socket:
    """Binds the socket before the address is announced, so that a port in use is refused here."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((settings.host, settings.port))
        made.listen(BACKLOG)  # clients that connect before the server is up wait a moment
    except OSError as error:
        made.close()
        raise InvalidConfig(
            f"cannot serve on {settings.host}:{settings.port}: {error.strerror or error}",
            "Choose another --host or --port, or stop what uses it.",
        ) from error
    return made


def tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    """The TLS context. The protocol starts TLS itself, because uvicorn would not count connections in a handshake."""
    if settings.tls_cert is None:
        return None
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        # an empty password, so that OpenSSL does not ask for one at the terminal
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except OSError as error:  # an SSLError is one too
        raise InvalidConfig(
            f"{settings.tls_cert} and {settings.tls_key} cannot be used: {error}",
            "Give PEM files that belong together, the key without a password.",
        ) from error
    return context


def with_room(settings: ServerSettings) -> ServerSettings:
    """Lowers `max_connections` to what the limit of open files allows, after raising that limit if possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = settings.connections + OTHER_FILES
    needed = settings.max_connections + others
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return settings
    allowed = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return settings
    most = max(1, allowed - others)
    logger.warning("at most %d connections: this process may have %d files open (ulimit -n)", most, hard)
    return replace(settings, max_connections=most)


def serve(engine: Custody, settings: ServerSettings, *, ready: Callable[[str], object] = lambda _: None) -> None:
    """Serves until SIGTERM or Ctrl-C. `ready` is called with the address."""
    server = Server(engine, settings)
    ready(server.url)
    server.run()
