"""The HTTP protocol of one connection, with limits of number, size and time. uvicorn and httptools alone would accept a
head of any size and any number of pipelined requests, and wait for ever for a body and for the reader of an answer."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import Any, cast

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from custody.errors import Busy
from custody.http.connections import Connection, Connections, CountingTransport
from custody.wire.answers import ErrorBody, ErrorOut

logger = logging.getLogger(__name__)

LARGEST_HEAD = 64 * 1024
MOST_HEADERS = 200
LINGER = 5.0
"""Seconds to read the rest of a body after an early answer, so that a client that still sends can read the answer."""
LARGEST_REST = 16 * 2**20
PIECE = 4096
"""Bytes that are parsed at a time. Then parsing stops if requests wait: each costs far more memory than its bytes."""

_NO_ROOM = ErrorBody(
    code=Busy.code,
    message="the server has reached its limit of connections",
    remedy="Try again in a moment, on fewer connections; `--max-connections` of the server is the limit.",
)


def _whole(status: int, kind: bytes, text: bytes, extra: bytes = b"") -> bytes:
    """A whole answer with `connection: close`."""
    head = b"content-type: %s\r\ncontent-length: %d\r\n%sconnection: close\r\n\r\n" % (kind, len(text), extra)
    return STATUS_LINE[status] + head + text


_CROWDED = _whole(503, b"application/json", msgspec.json.encode(ErrorOut(_NO_ROOM)), b"retry-after: 1\r\n")


_FRAMING = (b"content-length", b"transfer-encoding")
"""Headers that determine the end of a body."""


class _TooLarge(Exception):
    pass


class _Flow(FlowControl):
    """Does not resume reading while requests wait that were read already."""

    def __init__(self, transport: asyncio.Transport, behind: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._behind = behind

    def resume_reading(self) -> None:
        if not self._behind():
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `head_timeout` is for the first line and the headers; a body has its own limit (dispatch.py)."""

    head_timeout = 30.0
    all: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._size, self._after = 0, 0
        self._complete, self._whole, self._oversize = True, True, False
        self._disregarded = False
        self._late: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._rest = b""
        self._upgrades = False
        self.connection: Connection | None = None
        self.lost = False
        self.watching: set[Callable[[], object]] = set()
        """Called when the client disconnects."""

    # as uvicorn has it, which asyncio's own type does not allow
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.connection is None and (admitted := admitted_by(self.all, transport)) is not None:
            self.connection = admitted
        if self.connection is None:
            self.transport = transport  # it is being closed: there will be no request
            return
        self.connection.idle = self._idle
        super().connection_made(cast(asyncio.Transport, CountingTransport(transport, self.connection)))
        self.flow = _Flow(transport, lambda: bool(self.pipeline or self._rest))
        self._late = self.loop.call_later(self.head_timeout, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.connection is None:
            return
        self.lost = True
        for leave in list(self.watching):
            leave()
        self.all.forget(self.connection)
        self._in_time()
        if self._lingering is not None:
            self._lingering.cancel()
        self._rest = b""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.connection is None:
            return
        if self._rest or self.pipeline:  # while parsed requests wait, the rest stays unparsed
            self._rest += data
            return
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            if self.pipeline:
                self._rest = data[start:]
                self.flow.pause_reading()
                return
            self._parse(data[start : start + PIECE] if len(data) > PIECE else data)
            if self.transport.is_closing():
                return

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            data = data[upgrade.args[0] :]
            self._stay()
            if data:
                self._parse(data)
            return
        except httptools.HttpParserError:
            self.logger.warning(message := "Invalid HTTP request received.")
            self.send_400_response(message)
        if self.transport.is_closing():
            return
        if not self._complete:
            # the parser does not tell how much of a head it has
            self._size += len(data)
            if self._size >= LARGEST_HEAD:
                self._oversize = True
                self.send_400_response("")
                return
        elif not self._idle() or not self._whole:
            return
        # a head has begun, or empty lines before one: the timeout is for both
        if self._late is None and self.timeout_keep_alive_task is None:
            self._late = self.loop.call_later(self.head_timeout, self._too_slow)

    def _stay(self) -> None:
        """Goes on with HTTP/1.1 after a request that offers an upgrade, as some clients do with every request. The
        parser would take its body for the other protocol, and for the next request, so a new one begins at the body."""
        self.parser = httptools.HttpRequestParser(_FromBody(self))
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        framing = [b"%s: %s\r\n" % header for header in self.headers if header[0] in _FRAMING]
        self._upgrades = False
        self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))

    def _idle(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return (cycle is None or cycle.response_complete) and not self.pipeline

    def on_message_begin(self) -> None:
        self._size, self._complete, self._whole, self._disregarded = 0, False, False, False
        super().on_message_begin()
        self.scope["custody.connection"] = self  # type: ignore[typeddict-unknown-key]  # for the middleware

    def on_headers_complete(self) -> None:
        if len(self.headers) > MOST_HEADERS:
            self._oversize = True
            raise _TooLarge  # ends the parser, which leads to send_400_response
        self._upgrades = self.parser.should_upgrade()
        self._complete, self._after = True, 0
        self._in_time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._disregarded or self.cycle.response_complete:  # the rest of the body is dropped
            self._after += len(body)
            if self._after > LARGEST_REST:
                self.transport.close()
        if not self._disregarded:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrades:
            return
        self._whole = True
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
            self._keep_alive()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.pipeline:
            return
        if self._rest:
            self.loop.call_soon(self._feed_rest)
        elif self._complete and not self._whole:
            # answered before the body was complete; it comes before the next request, so it is read, but not for long
            self._unset_keepalive_if_required()
            self._lingering = self.loop.call_later(min(LINGER, self.head_timeout), self.transport.close)

    def _keep_alive(self) -> None:
        if self.timeout_keep_alive_task is None and self._idle() and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _feed_rest(self) -> None:
        if self.pipeline or self.transport.is_closing():
            return
        rest, self._rest = self._rest, b""
        self._feed(rest)
        self.flow.resume_reading()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_slow(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            if self._complete:  # no byte has arrived
                self.transport.close()
            else:
                self._answer(408, b"The head of the request did not arrive in time.")

    def send_400_response(self, msg: str) -> None:
        if self._oversize:
            self._answer(431, b"The head of the request is too large.")
        else:
            super().send_400_response(msg)

    def _answer(self, status: int, text: bytes) -> None:
        self.transport.write(_whole(status, b"text/plain; charset=utf-8", text))
        self.transport.close()

    def hold_head(self) -> None:
        """The head of an answer comes next: it is sent with the beginning of the body."""
        cast(CountingTransport, self.transport).hold()

    @property
    def whole(self) -> bool:
        """Whether each request that has begun has arrived with its body."""
        return self._whole

    def disregard_body(self) -> None:
        """Drops what comes of the body of the request that is being answered, and goes on reading."""
        if not self._whole and not self.pipeline:  # otherwise the body that comes is of a later request
            self._disregarded, self.cycle.body = True, bytearray()
            self.flow.resume_reading()

    def trust(self) -> None:
        """Marks the connection as trusted: a request on it was admitted."""
        if self.connection is not None and not self.connection.trusted:
            self.all.trust(self.connection)


class _FromBody:
    """Receives the callbacks of a parser that begins at a body: ignores the head that was fed to it, as it is known."""

    def __init__(self, connection: BoundedProtocol) -> None:
        self._connection, self._known = connection, True
        self.on_body, self.on_message_complete = connection.on_body, connection.on_message_complete

    def on_message_begin(self) -> None:
        if not self._known:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._known:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._known:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._known:
            self._known = False
        else:
            self._connection.on_headers_complete()


def admitted_by(all: Connections, transport: asyncio.Transport, *, plain: bool = True) -> Connection | None:
    """Admits a connection if there is room; otherwise closes it, with a 503 if it is `plain` HTTP."""
    admitted = all.admit(transport)
    if admitted is None:
        if plain:
            transport.write(_CROWDED)
            transport.close()
        else:
            transport.abort()
    return admitted


class TlsProtocol(asyncio.Protocol):
    """A connection during its TLS handshake. It is counted like every other, and the handshake has the time limit of a
    head. Data that arrives before the HTTP protocol has taken over is kept for it."""

    protocol: type[BoundedProtocol]
    context: ssl.SSLContext

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._inner = self.protocol(*args, **kwargs)
        self._early: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        raw = cast(asyncio.Transport, transport)
        connection = admitted_by(self.protocol.all, raw, plain=False)
        if connection is None:
            return
        raw.pause_reading()  # until the handshake begins
        self._inner.connection = connection
        self._task = self._inner.loop.create_task(self._shake(raw, connection))

    async def _shake(self, raw: asyncio.Transport, connection: Connection) -> None:
        try:
            secured = await self._inner.loop.start_tls(
                raw, self, self.context, server_side=True, ssl_handshake_timeout=self.protocol.head_timeout
            )
        except (OSError, ssl.SSLError, ConnectionError) as error:  # the client does not speak TLS, or has disconnected
            logger.debug("no TLS with %s: %s", connection.address, error)
            self.protocol.all.forget(connection)
            raw.abort()
            return
        if secured is None or secured.is_closing():
            self.protocol.all.forget(connection)
            return
        connection.secured = secured
        self._inner.connection_made(secured)
        secured.set_protocol(self._inner)
        for data in self._early:
            self._inner.data_received(data)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._inner.connection is not None:
            self.protocol.all.forget(self._inner.connection)


def bounded(all: Connections, *, head_timeout: float, context: ssl.SSLContext | None = None) -> type[asyncio.Protocol]:
    """A protocol class with these limits; uvicorn makes an instance for each connection."""
    made = type("BoundedProtocol", (BoundedProtocol,), {"all": all, "head_timeout": head_timeout})
    return made if context is None else type("TlsProtocol", (TlsProtocol,), {"protocol": made, "context": context})
