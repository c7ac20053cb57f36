"""Payloads in the source of a test: a small one as a literal, a large one packed into a string."""

from __future__ import annotations

import ast
import base64
import zlib
from pprint import pformat

from custody.errors import CustodyError
from custody.model.codec import decode_raw, encode
from custody.model.entities import Payload

SMALL = 4_000
"""Most bytes of a payload that is written as a literal."""
WIDTH = 100


def literal(payload: Payload) -> str:
    """An expression of Python that gives exactly this payload: a literal, or a call of `unpacked`."""
    kind, data = encode(payload)
    if len(data) <= SMALL and (text := _literal(payload, kind, data)) is not None:
        return text
    return f"unpacked({kind.decode()!r}, {_lines(base64.b64encode(zlib.compress(data, 9)).decode())})"


def unpacked(kind: str, packed: str) -> Payload:
    """The payload that `custody capture` has packed: its kind (json, text or bytes: j, t, b) and its bytes."""
    return decode_raw(kind, zlib.decompress(base64.b64decode(packed)))


def _literal(payload: Payload, kind: bytes, data: bytes) -> str | None:
    """A literal that gives the same bytes; None if there is none, as for what nests too deeply for Python's parser."""
    try:
        text = pformat(payload, width=WIDTH, sort_dicts=False)
        return text if encode(ast.literal_eval(text)) == (kind, data) else None
    except (ValueError, SyntaxError, MemoryError, RecursionError, CustodyError):
        return None


def _lines(text: str) -> str:
    parts = [text[start : start + WIDTH] for start in range(0, len(text), WIDTH)]
    return '"""\n' + "\n".join(parts) + '\n"""'
