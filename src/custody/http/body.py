"""The body of a request: whole, within the limits of size, time and memory, and without its compression."""

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
"""So much is inflated at a time."""


class Body:
    """Reads one body, and counts the memory that it takes until it is released."""

    __slots__ = ("_headers", "_held", "_state")

    def __init__(self, state: ServerState, headers: Mapping[bytes, bytes]) -> None:
        self._state, self._headers, self._held = state, headers, 0

    async def read(self, receive: Receive) -> bytes:
        """The body as the client had it before it compressed it."""
        limit, timeout = self._state.max_body, self._state.body_timeout
        compressed = self._compressed()
        self._held = await self._state.bodies.take(self._announced(limit), timeout)
        given = await _received(receive, limit, timeout)
        if not compressed or not given:
            return given
        async with self._state.inflating:  # a few at a time: what comes out is counted when it is there
            inflated = await asyncio.to_thread(inflate, given, limit)
            self._held += await self._state.bodies.take(len(inflated), timeout)
        return inflated

    def release(self) -> None:
        """Nobody needs the body any more."""
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
            "Send it with gzip, or as it is and without that header.",
        )

    def _announced(self, limit: int) -> int:
        """The size of the body by its Content-Length; without one, the largest that is allowed."""
        length = self._headers.get(b"content-length", b"")
        if not length.isdigit():
            return limit if b"transfer-encoding" in self._headers else 0
        if int(length) > limit:
            raise _too_large(limit)
        return int(length)


async def _received(receive: Receive, limit: int, timeout: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise InvalidArgument("the client went away in the middle of its request")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise _too_large(limit)
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        raise RequestTimeout(f"the body did not come within {timeout:g} s", "Send it again.") from None


def inflate(given: bytes, limit: int) -> bytes:
    """What was compressed with gzip. Nothing is inflated beyond the limit."""
    parts: list[bytes] = []
    left, whole = limit, memoryview(given)
    member = zlib.decompressobj(_GZIP)
    try:
        # in pieces: what follows the end of a member is copied, and there may be very many members
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
        raise InvalidJson(f"the body is not gzip: {error}", "Leave out Content-Encoding if it is plain.") from error
    if not member.eof:
        raise InvalidJson("the body is not gzip to its end", "Send all of it.")
    return b"".join(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit:,} bytes", "Send less at a time, or raise --max-body.")
