"""The answer to a request."""

from __future__ import annotations

from msgspec import Struct


class Answer(Struct, frozen=True):
    """A status, an encoded body, and further headers."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"
