"""The head of a request: bounded in size and in time. uvicorn and httptools would take one of any size, for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

LARGEST_HEAD = 64 * 1024


class _TooLarge(Exception):
    pass


class Bounded(HttpToolsProtocol):
    """One connection. `head_timeout` is for the first line and the headers; a body has its own limit (dispatch.py)."""

    head_timeout = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._size = 0
        self._complete, self._oversize = True, False
        self._late: asyncio.TimerHandle | None = None

    # as uvicorn has it, which asyncio's own type does not allow
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._late = self.loop.call_later(self.head_timeout, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._complete or self.transport.is_closing():
            return
        # what is not whole yet is with the parser, which does not tell how much it is
        self._size += len(data)
        if self._size > LARGEST_HEAD:
            self._refuse()
        elif self._late is None:
            self._late = self.loop.call_later(self.head_timeout, self._too_slow)

    def on_message_begin(self) -> None:
        self._size, self._complete = 0, False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._grow(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._grow(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._complete = True
        self._in_time()
        super().on_headers_complete()

    def _grow(self, count: int) -> None:
        self._size += count
        if self._size > LARGEST_HEAD:
            self._oversize = True
            raise _TooLarge  # the parser stops at it, and send_400_response is called

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_slow(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            if self._complete:  # nothing has come at all
                self.transport.close()
            else:
                self._answer(408, b"The head of the request did not come in time.")

    def _refuse(self) -> None:
        self._oversize = True
        self.send_400_response("")

    def send_400_response(self, msg: str) -> None:
        if self._oversize:
            self._answer(431, b"The head of the request is too large.")
        else:
            super().send_400_response(msg)

    def _answer(self, status: int, text: bytes) -> None:
        head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(text)
        self.transport.write(STATUS_LINE[status] + head + text)
        self.transport.close()


def bounded(head_timeout: float) -> type[Bounded]:
    """The protocol with this time limit; uvicorn makes one for each connection."""
    return type("BoundedProtocol", (Bounded,), {"head_timeout": head_timeout})
