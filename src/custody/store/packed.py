"""Arrays in PostgreSQL's binary format. The driver looks at each element of a list; these are packed in one pass."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import psycopg
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format

from custody.model.codec import Encoded

_NULL = b"\xff\xff\xff\xff"
_LENGTH = struct.Struct("!i").pack
_FOUR_BYTES = 4 << 32
# number of dimensions, whether there are nulls, the type of the elements, their number, the first subscript
_HEADER = struct.Struct("!iiIii").pack
_EMPTY = struct.Struct("!iiI").pack
_LETTERS = {bytes([code]): _LENGTH(1) + bytes([code]) for code in range(128)}


class Packed:
    """An array that was packed: its elements, each after its length. The driver finds its type by the class."""

    __slots__ = ("data",)
    element: ClassVar[int]

    def __init__(self, count: int, elements: Iterable[bytes]) -> None:
        header = _HEADER(1, 1, self.element, count, 1) if count else _EMPTY(0, 0, self.element)
        self.data = b"".join((header, *elements))


class Texts(Packed):
    __slots__ = ()
    element = 25


class ByteStrings(Packed):
    __slots__ = ()
    element = 17


class Letters(Packed):
    __slots__ = ()
    element = 18


class Integers(Packed):
    __slots__ = ()
    element = 23


class _PackedDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: Packed) -> Buffer:
        return obj.data


class _TextsDumper(_PackedDumper):
    oid = 1009


class _ByteStringsDumper(_PackedDumper):
    oid = 1001


class _LettersDumper(_PackedDumper):
    oid = 1002


class _IntegersDumper(_PackedDumper):
    oid = 1007


_DUMPERS: dict[type[Packed], type[Dumper]] = {
    Texts: _TextsDumper, ByteStrings: _ByteStringsDumper, Letters: _LettersDumper, Integers: _IntegersDumper,
}  # fmt: skip


def register(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Teaches a connection to send packed arrays."""
    for kind, dumper in _DUMPERS.items():
        connection.adapters.register_dumper(kind, dumper)


@lru_cache(maxsize=65536)
def _text(text: str | None) -> bytes:
    if text is None:
        return _NULL
    data = text.encode()
    return _LENGTH(len(data)) + data


def texts(values: Sequence[str | None]) -> Texts:
    """Texts that come again and again, such as keys."""
    return Texts(len(values), map(_text, values))


def documents(values: Sequence[bytes | None]) -> Texts:
    """Texts that are encoded already. If all are null, the array is empty."""
    if not any(values):
        return Texts(0, ())
    return Texts(len(values), [_NULL if one is None else _LENGTH(len(one)) + one for one in values])


def byte_strings(values: Sequence[bytes]) -> ByteStrings:
    # joined with their lengths before: the join costs more for each part than the copy does
    return ByteStrings(len(values), [_LENGTH(len(one)) + one for one in values])


def letters(values: Sequence[bytes]) -> Letters:
    """Values of PostgreSQL's type "char"."""
    return Letters(len(values), map(_LETTERS.__getitem__, values))


def ends(parts: Sequence[bytes]) -> Integers:
    """Where each of the byte strings ends when they are joined."""
    return _numbers(array("q", accumulate(map(len, parts), initial=_FOUR_BYTES))[1:])


def joined_columns(messages: Sequence[Encoded]) -> dict[str, Any]:
    """As `columns`, with the payloads joined, and one kind if all are of it."""
    keys, kinds, payloads, headers = zip(*messages, strict=True)
    return {
        "keys": texts(keys) if any(keys) or "" in keys else Texts(0, ()),
        "kinds": letters(kinds[:1] if kinds.count(kinds[0]) == len(kinds) else kinds),
        "payloads": ByteStrings(0, ()),
        "headers": documents(headers),
        "joined": b"".join(payloads),
        "ends": ends(payloads),
    }


def columns(messages: Sequence[Encoded]) -> dict[str, Any]:
    """Messages as columns, the arguments of the SQL functions."""
    keys, kinds, payloads, headers = zip(*messages, strict=True) if messages else ((), (), (), ())
    return {
        "keys": texts(keys),
        "kinds": letters(kinds),
        "payloads": byte_strings(payloads),
        "headers": documents(headers),
    }


def integers(values: Iterable[int]) -> Integers:
    # each after its length, which is four bytes, as one number of eight
    return _numbers(array("q", [_FOUR_BYTES | (value & 0xFFFFFFFF) for value in values]))


def _numbers(fields: array[int]) -> Integers:
    if sys.byteorder == "little":
        fields.byteswap()
    return Integers(len(fields), [fields.tobytes()])
