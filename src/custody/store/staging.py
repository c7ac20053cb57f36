"""Writes what a task staged, on the one connection of its process: messages by PostgreSQL's binary COPY into the stage
table, and batches as finished rows of the log."""

from __future__ import annotations

import atexit
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

from custody.model.codec import Encoded
from custody.store.connecting import BoundedConnection
from custody.store.log_copy import SIGNATURE, TRAILER, row_tail
from custody.store.postgres import Connection, Row, run_function, translated
from custody.store.staged_batches import Batch

_COLUMNS = (
    "attempt", "topic_id", "partition", "n", "source_partition", "source_offset", "key", "kind", "payload", "headers",
)  # fmt: skip
# number of columns, then (length, value) of attempt, topic and partition; the same of number and source
_PLACE = struct.Struct("!hiqiiii").pack
_SOURCE = struct.Struct("!iiiiiq").pack
_connections: dict[tuple[int, str], BoundedConnection] = {}


@dataclass
class Staged:
    """What an attempt writes: messages as rows of the stage, and batches with their topic and partition."""

    rows: list[bytes] = field(default_factory=list)
    batches: list[tuple[int, int, Batch]] = field(default_factory=list)


def rows_of(
    attempt: int, topic_id: int, partition: int, sources: Sequence[tuple[int, int]], messages: Sequence[Encoded]
) -> list[bytes]:
    """The rows of an attempt for a partition, one for each message."""
    start = _PLACE(10, 8, attempt, 4, topic_id, 4, partition)
    return [
        start + _SOURCE(4, n, 4, source[0], 8, source[1]) + row_tail(*message)
        for n, (source, message) in enumerate(zip(sources, messages, strict=True))
    ]


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


def write(url: str, stage: str, attempt: int, staged: Staged) -> None:
    """Writes what a task attempt staged, in one transaction."""
    if not staged.rows and not staged.batches:
        return
    # a transaction of its own: the tasks of a claim record the same segment, and would wait for one another
    segments = {
        topic_id: call(url, "stage_segment", stage=stage, topic_id=topic_id)[0]
        for topic_id in sorted({topic_id for topic_id, _, _ in staged.batches})
    }
    with connection(url) as held, held.transaction():
        for topic_id, partition, batch in staged.batches:
            segment, base = segments[topic_id]
            place = {"segment": segment, "base": base, "attempt": attempt, "topic_id": topic_id}
            run_function(held, "stage_batch", {"stage": stage, **place, "partition": partition, **batch.arguments()})
        if staged.rows:
            _copy(held, stage, staged.rows)


def _copy(held: Connection, stage: str, rows: list[bytes]) -> None:
    target = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT BINARY)").format(
        sql.Identifier("custody", stage), sql.SQL(", ").join(map(sql.Identifier, _COLUMNS))
    )
    with held.cursor() as cursor, cursor.copy(target) as copy:
        copy.write(SIGNATURE)
        for start in range(0, len(rows), 4096):
            copy.write(b"".join(rows[start : start + 4096]))
        copy.write(TRAILER)
