"""What goes back to whoever asked."""

from __future__ import annotations

from msgspec import Struct


class Answer(Struct, frozen=True):
    """What is sent back: a status, a body that is JSON already, and further headers."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"
