"""Writes rows to a stage table in PostgreSQL's binary COPY format, on the one connection of a task's process."""

from __future__ import annotations

import atexit
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql

from custody.store.connecting import BoundedConnection
from custody.store.log_copy import SIGNATURE, TRAILER
from custody.store.postgres import Connection, Row, run_function, translated

_COLUMNS = (
    "attempt", "topic_id", "partition", "n", "source_partition", "source_offset", "key", "kind", "payload", "headers",
)  # fmt: skip
# number of columns, then (length, value) of attempt, topic and partition; the same of number and source
_PLACE = struct.Struct("!hiqiiii").pack
_SOURCE = struct.Struct("!iiiiiq").pack
_connections: dict[tuple[int, str], BoundedConnection] = {}


def row_start(attempt: int, topic_id: int, partition: int) -> bytes:
    """The part of a row that all rows of an attempt for a partition have."""
    return _PLACE(10, 8, attempt, 4, topic_id, 4, partition)


def stage_row(start: bytes, n: int, source_partition: int, source_offset: int, tail: bytes) -> bytes:
    """One row; `start` comes from `row_start`, `tail` from `log_copy.row_tail`."""
    return start + _SOURCE(4, n, 4, source_partition, 8, source_offset) + tail


@contextmanager
def connection(url: str) -> Iterator[Connection]:
    """The connection of this process, in autocommit mode. A new one is opened after a loss or a fork."""
    mine = (os.getpid(), url)
    with translated():
        held = _connections.get(mine)
        if held is not None and held.stale:
            _connections.pop(mine).close()
            held = None
        if held is None:
            held = BoundedConnection.connect(url, autocommit=True, application_name="custody-task")
            _connections[mine] = held
        try:
            with held.level():
                yield held
        except (psycopg.OperationalError, psycopg.InterfaceError):
            _connections.pop(mine, None)
            held.close()
            raise


@atexit.register
def close_all() -> None:
    """Closes the connections of this process. Those from before a fork belong to the parent."""
    for held in [held for held in _connections if held[0] == os.getpid()]:
        _connections.pop(held).close()


def call(url: str, function: str, /, **arguments: object) -> list[Row]:
    """Calls an SQL function on the connection of this process."""
    with connection(url) as held:
        return run_function(held, function, arguments)


def copy_staged(url: str, stage: str, rows: list[bytes]) -> None:
    """Writes the rows of a task attempt in one transaction."""
    target = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier("custody", stage), sql.SQL(", ").join(map(sql.Identifier, _COLUMNS))
    )
    with connection(url) as held, held.cursor() as cursor, cursor.copy(target) as copy:
        copy.write(SIGNATURE)
        for start in range(0, len(rows), 4096):
            copy.write(b"".join(rows[start : start + 4096]))
        copy.write(TRAILER)
