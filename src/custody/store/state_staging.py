"""Writes states of keys to a stage table in PostgreSQL's binary COPY format, on the connection of a task's process."""

from __future__ import annotations

import struct

from psycopg import sql

from custody.store.log_copy import SIGNATURE, TRAILER
from custody.store.staging import connection

_COLUMNS = ("attempt", "partition", "offset", "key", "state")
# number of columns, then (length, value) of attempt, partition and offset, and the length of the key
_FIXED = struct.Struct("!hiqiiiqi").pack
_LENGTH = struct.Struct("!i").pack
_NULL = b"\xff\xff\xff\xff"


def state_row(attempt: int, partition: int, offset: int, key: bytes, state: bytes | None) -> bytes:
    """One row; without a state, the message has cleared it."""
    tail = _NULL if state is None else _LENGTH(len(state)) + state
    return _FIXED(5, 8, attempt, 4, partition, 8, offset, len(key)) + key + tail


def copy_states(url: str, stage: str, rows: list[bytes]) -> None:
    """Writes rows of a task attempt in one transaction."""
    target = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier("custody", stage), sql.SQL(", ").join(map(sql.Identifier, _COLUMNS))
    )
    with connection(url) as held, held.cursor() as cursor, cursor.copy(target) as copy:
        copy.write(SIGNATURE)
        for start in range(0, len(rows), 4096):
            copy.write(b"".join(rows[start : start + 4096]))
        copy.write(TRAILER)
