"""Reads the body of a request within limits of size, time and memory, and decompresses it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from custody.errors import InvalidArgument, InvalidJson, RequestTimeout, TooLarge, UnsupportedEncoding
from custody.http.asgi import Receive

if TYPE_CHECKING:
    from custody.http.state import ServerState

_GZIP = 16 + zlib.MAX_WBITS
PIECE = 4096
"""Bytes that are inflated at a time."""


class Body:
    """Reads one body, and reserves the memory for it until it is released."""

    __slots__ = ("_headers", "_held", "_state")

    def __init__(self, state: ServerState, headers: Mapping[bytes, bytes]) -> None:
        self._state, self._headers, self._held = state, headers, 0

    async def read(self, receive: Receive, *, whole: bool) -> bytes:
        """The whole body, decompressed. `whole`: all of it has arrived, so that there is nothing to wait for."""
        limit, timeout = self._state.max_body, self._state.body_timeout
        compressed = self._compressed()
        self._held = await self._state.bodies.take(self._announced(limit), timeout)
        given = await (_received(receive, limit) if whole else _in_time(receive, limit, timeout))
        if not compressed or not given:
            return given
        async with self._state.inflating:  # a few at a time, because their size is known only afterwards
            inflated = await asyncio.to_thread(inflate, given, limit)
            self._held += await self._state.bodies.take(len(inflated), timeout)
        return inflated

    def release(self) -> None:
        """Gives back the reserved memory."""
        self._state.bodies.give(self._held)
        self._held = 0

    def _compressed(self) -> bool:
        encoding = self._headers.get(b"content-encoding", b"").strip().lower()
        if encoding in (b"gzip", b"x-gzip"):
            return True
        if encoding in (b"", b"identity"):
            return False
        raise UnsupportedEncoding(
            f"a body with Content-Encoding {encoding.decode(errors='replace')[:100]!r} cannot be read",
            "Send it with gzip, or uncompressed and without that header.",
        )

    def _announced(self, limit: int) -> int:
        """The Content-Length; for a chunked body the largest size that is allowed."""
        length = self._headers.get(b"content-length", b"")
        if not length.isdigit():
            return limit if b"transfer-encoding" in self._headers else 0
        if int(length) > limit:
            raise _too_large(limit)
        return int(length)


async def _in_time(receive: Receive, limit: int, timeout: float) -> bytes:
    try:
        async with asyncio.timeout(timeout):
            return await _received(receive, limit)
    except TimeoutError:
        raise RequestTimeout(f"the body did not come within {timeout:g} s", "Send it again.") from None


async def _received(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise InvalidArgument("the client disconnected before the end of its request")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not message.get("more_body"):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def inflate(given: bytes, limit: int) -> bytes:
    """Decompresses gzip. Stops as soon as the result exceeds the limit."""
    parts: list[bytes] = []
    left, whole = limit, memoryview(given)
    member = zlib.decompressobj(_GZIP)
    try:
        # in pieces, because zlib copies what follows the end of a member, and there may be very many members
        for start in range(0, len(whole), PIECE):
            rest: bytes | memoryview = whole[start : start + PIECE]
            while rest:
                if member.eof:
                    member = zlib.decompressobj(_GZIP)
                parts.append(member.decompress(rest, left + 1))
                left -= len(parts[-1])
                if left < 0:
                    raise _too_large(limit)
                rest = member.unused_data
    except zlib.error as error:
        raise InvalidJson(
            f"the body is not gzip: {error}", "Leave out Content-Encoding if the body is not compressed."
        ) from error
    if not member.eof:
        raise InvalidJson("the gzip body is incomplete", "Send all of it.")
    return b"".join(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit:,} bytes", "Send less at a time, or raise --max-body.")
