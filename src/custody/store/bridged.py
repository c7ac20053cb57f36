"""Connections of an event loop for blocking code that `bridge` runs: what our statements use of psycopg's `Connection`
and `Cursor`, on an `AsyncConnection`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

import psycopg
from psycopg.rows import AsyncRowFactory

from custody.bridge import Entered, awaited


class BridgedCursor:
    """A cursor whose calls wait on the event loop."""

    def __init__(self, cursor: psycopg.AsyncCursor[Any]) -> None:
        self._cursor = cursor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        awaited(self._cursor.close())

    def execute(self, query: Any, params: Any = None, **how: Any) -> Self:
        awaited(self._cursor.execute(query, params, **how))
        return self

    def fetchone(self) -> Any:
        return awaited(self._cursor.fetchone())

    def fetchall(self) -> list[Any]:
        return awaited(self._cursor.fetchall())

    @property
    def rowcount(self) -> int:
        return self._cursor.rowcount

    @contextmanager
    def copy(self, statement: Any) -> Iterator[BridgedCopy]:
        with Entered(self._cursor.copy(statement)) as copy:
            yield BridgedCopy(copy)


class BridgedCopy:
    """A COPY whose calls wait on the event loop."""

    def __init__(self, copy: psycopg.AsyncCopy) -> None:
        self._copy = copy

    def write(self, buffer: bytes) -> None:
        awaited(self._copy.write(buffer))


class BridgedConnection:
    """A connection whose calls wait on the event loop."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        """What needs no waiting."""
        return getattr(self._connection, name)

    def own_cursor(self, factory: AsyncRowFactory[Any]) -> Any:
        return BridgedCursor(psycopg.AsyncCursor(self._connection, row_factory=factory))

    def cursor(self, *, binary: bool = False, row_factory: AsyncRowFactory[Any] | None = None) -> BridgedCursor:
        if row_factory is None:
            return BridgedCursor(self._connection.cursor(binary=binary))
        return BridgedCursor(self._connection.cursor(binary=binary, row_factory=row_factory))

    def execute(self, query: Any, params: Any = None, **how: Any) -> BridgedCursor:
        return BridgedCursor(awaited(self._connection.execute(query, params, **how)))

    def transaction(self) -> AbstractContextManager[object]:
        return Entered(self._connection.transaction())

    def level(self) -> AbstractContextManager[object]:
        return self.transaction() if self.names_level else nullcontext()

    def close(self) -> None:
        awaited(self._connection.close())
