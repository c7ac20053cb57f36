"""Writes rows to the log in PostgreSQL's binary COPY format, the fastest way for a batch."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from psycopg import sql

from custody.store.postgres import Connection

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_ONE_BYTE = b"\0\0\0\1"
_COLUMNS = ("segment_id", "partition", "offset", "published_at", "key", "kind", "payload", "headers")
# number of columns, then (length, value) of segment, partition, offset and time
_FIXED = struct.Struct("!hiiiiiqiq").pack
_LENGTH = struct.Struct("!i").pack


@lru_cache(maxsize=65536)
def _key_field(key: str) -> bytes:
    text = key.encode()
    return _LENGTH(len(text)) + text


def row_tail(key: str | None, kind: bytes, payload: bytes, headers: bytes | None) -> bytes:
    """The part of a row that does not depend on its offset: key, kind, payload, headers (JSON)."""
    start = _NULL if key is None else _key_field(key)
    if headers is None:
        return start + _ONE_BYTE + kind + _LENGTH(len(payload)) + payload + _NULL
    # jsonb: its version, then the text
    return start + _ONE_BYTE + kind + _LENGTH(len(payload)) + payload + _LENGTH(len(headers) + 1) + b"\1" + headers


@lru_cache(maxsize=1024)
def _copy_into(segment_id: int) -> bytes:
    target = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier("custody", f"log_{segment_id}"), sql.SQL(", ").join(map(sql.Identifier, _COLUMNS))
    )
    return target.as_bytes(None)


def copy_rows(
    connection: Connection,
    segment_id: int,
    tails: Iterable[bytes],
    partitions: Iterable[int],
    offsets: Iterable[int],
    times: Mapping[int, datetime],
) -> None:
    """Appends rows to a segment in the caller's transaction, which has locked the heads of the partitions.

    `times` has the time of publishing for each partition.
    """
    stamps = {partition: (time - _EPOCH) // _MICROSECOND for partition, time in times.items()}
    buffer: list[bytes] = [SIGNATURE]
    for tail, partition, offset in zip(tails, partitions, offsets, strict=True):
        buffer.append(_FIXED(8, 4, segment_id, 4, partition, 8, offset, 8, stamps[partition]))
        buffer.append(tail)
    buffer.append(TRAILER)
    with connection.cursor() as cursor, cursor.copy(_copy_into(segment_id)) as copy:
        copy.write(b"".join(buffer))
