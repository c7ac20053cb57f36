"""Rows for the log in PostgreSQL's binary COPY format: the fastest way in for a batch."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from psycopg import sql

from custody.store.postgres import Connection

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SIGNATURE = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_COLUMNS = ("segment_id", "partition", "offset", "published_at", "key", "kind", "payload", "headers")
# number of columns, then (length, value) of segment, partition, offset and time
_FIXED = struct.Struct("!hiiiiiqiq").pack
_LENGTH = struct.Struct("!i").pack

Encoded = tuple[str | None, bytes, bytes, bytes | None]
"""key, kind, payload, headers (JSON) of one message."""


def copy_rows(
    connection: Connection,
    segment_id: int,
    messages: Sequence[Encoded],
    partitions: Sequence[int],
    offsets: Sequence[int],
    times: Sequence[datetime],
) -> None:
    """Appends the messages to a segment, inside the caller's transaction, which holds the heads of the partitions."""
    stamps = {time: (time - _EPOCH) // _MICROSECOND for time in set(times)}
    buffer: list[bytes] = [_SIGNATURE]
    add = buffer.append
    for (key, kind, payload, headers), partition, offset, time in zip(
        messages, partitions, offsets, times, strict=True
    ):
        add(_FIXED(8, 4, segment_id, 4, partition, 8, offset, 8, stamps[time]))
        if key is None:
            add(_NULL)
        else:
            text = key.encode()
            add(_LENGTH(len(text)))
            add(text)
        add(b"\0\0\0\1" + kind)
        add(_LENGTH(len(payload)))
        add(payload)
        if headers is None:
            add(_NULL)
        else:
            add(_LENGTH(len(headers) + 1) + b"\1")  # jsonb: its version, then the text
            add(headers)
    add(_TRAILER)
    target = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier("custody", f"log_{segment_id}"), sql.SQL(", ").join(map(sql.Identifier, _COLUMNS))
    )
    with connection.cursor() as cursor, cursor.copy(target) as copy:
        copy.write(b"".join(buffer))
