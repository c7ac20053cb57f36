"""Slices of batches, as the database returns them: messages that follow each other, in one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

One = tuple[int, str | None, str, bytes, dict[str, str] | None]
"""The offset, key, kind, payload and headers of a message."""


def one_by_one(
    offset: int,
    key: str | None,
    kind: str,
    payload: bytes,
    headers: Any,
    ends: Sequence[int] | None,
    keys: Sequence[str | None] | None,
) -> Iterator[One]:
    """The messages of a row, which is a message if it has no `ends`, and otherwise a slice (see `custody.slice`)."""
    if ends is None:
        yield offset, key, kind, payload, headers
        return
    count = len(ends)
    none = (None,) * count
    start = base = ends[-1] - len(payload)
    kinds = kind if len(kind) == count else kind * count
    for end, each, letter, named in zip(ends, keys or none, kinds, headers or none, strict=True):
        yield offset, each, letter, payload[start - base : end - base], named
        start = end
        offset += 1
