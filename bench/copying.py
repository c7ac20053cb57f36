"""Bare COPY of messages into a table like that of a log: the limit of publishing."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from psycopg import sql

from bench.backlog import log_table
from bench.measure import repeat
from bench.stage import Connection
from custody import Custody, Outgoing

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"
NULL = b"\xff\xff\xff\xff"
# eight columns; (length, value) of segment, partition, offset and time; the length of the key
FIXED = struct.Struct("!hiiiiiqiqi").pack
# (length, value) of the kind; the length of the payload
KIND = struct.Struct("!ici").pack
COLUMNS = 'segment_id, partition, "offset", published_at, key, kind, payload, headers'
COPY = sql.SQL(f"COPY bare ({COLUMNS}) FROM STDIN (FORMAT BINARY)")


class BareCopy:
    """The same batch again and again, in binary, each time as new rows and with a commit of its own."""

    def __init__(self, c: Custody, connection: Connection, messages: Sequence[Outgoing]) -> None:
        self._connection = connection
        self._messages = [(str(message.key).encode(), bytes(message.payload)) for message in messages]
        self._next = 0
        c.create_topic("like")
        connection.execute(sql.SQL("CREATE TABLE bare (LIKE {} INCLUDING ALL)").format(log_table(connection, "like")))
        (self._segment,) = connection.execute("SELECT max(segment_id) FROM custody.segments").fetchall()[0]

    def encode(self) -> bytes:
        """The next batch as COPY wants it."""
        now = int((datetime.now(UTC) - datetime(2000, 1, 1, tzinfo=UTC)).total_seconds() * 1e6)
        parts = [HEADER]
        for offset, (key, payload) in enumerate(self._messages, self._next):
            parts += (
                FIXED(8, 4, self._segment, 4, 0, 8, offset, 8, now, len(key)),
                key,
                KIND(1, b"b", len(payload)),
                payload,
                NULL,
            )
        self._next += len(self._messages)
        return b"".join([*parts, TRAILER])

    def copy(self, rows: bytes) -> None:
        with self._connection.cursor() as cursor, cursor.copy(COPY) as writer:
            writer.write(rows)

    def prepared(self, batches: int) -> Callable[[], None]:
        """Copies so many batches that were encoded before."""
        rows = iter([self.encode() for _ in range(batches)])
        return lambda: repeat(batches, lambda: self.copy(next(rows)))

    def encoding(self, batches: int) -> Callable[[], None]:
        """Copies so many batches, each encoded when its turn comes."""
        return lambda: repeat(batches, lambda: self.copy(self.encode()))
