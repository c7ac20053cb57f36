"""Calls SQL functions on a connection of asyncpg, which an application may have instead of psycopg.

It is enough for writing to the outbox, which needs no binary parameters of ours.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import DiagnosticField

from custody.bridge import awaited
from custody.errors import InvalidArgument
from custody.store.postgres import Row, call_numbered, translate

_DIAGNOSTICS = {
    DiagnosticField.SQLSTATE: "sqlstate",
    DiagnosticField.MESSAGE_PRIMARY: "message",
    DiagnosticField.MESSAGE_DETAIL: "detail",
    DiagnosticField.MESSAGE_HINT: "hint",
    DiagnosticField.CONSTRAINT_NAME: "constraint_name",
    DiagnosticField.COLUMN_NAME: "column_name",
}


def is_asyncpg(driver: Any) -> bool:
    """Whether it is a connection of asyncpg, without importing that."""
    return type(driver).__module__.partition(".")[0] == "asyncpg"


def run_asyncpg(connection: Any, function: str, arguments: dict[str, Any]) -> list[Row]:
    """Calls an SQL function on a connection of asyncpg, or one of SQLAlchemy that uses it; returns its rows."""
    statement, values = call_numbered(function, tuple(arguments)), tuple(arguments.values())
    try:
        if not is_asyncpg(connection):
            return [tuple(row) for row in awaited(connection.exec_driver_sql(statement, values)).fetchall()]
        if not connection.is_in_transaction():
            raise InvalidArgument(
                "the connection is not in a transaction: this would be committed at once, whatever becomes of your own "
                "change",
                "Call it inside `async with connection.transaction():`.",
            )
        return [tuple(row) for row in awaited(connection.fetch(statement, *values))]
    except Exception as error:
        reason = getattr(getattr(error, "orig", None), "__cause__", None) or error  # SQLAlchemy wraps it twice
        if not is_asyncpg(reason):
            raise
        raise translate(_as_psycopg(reason)) from error


def _as_psycopg(error: Any) -> psycopg.Error:
    """The same error as psycopg would raise it, so that one place translates both."""
    state = getattr(error, "sqlstate", None)
    if state is None:  # raised by the driver itself
        return psycopg.InterfaceError(str(error))
    info = {int(field): (getattr(error, name, None) or "").encode() or None for field, name in _DIAGNOSTICS.items()}
    try:
        kind = psycopg.errors.lookup(state)
    except KeyError:
        kind = psycopg.DatabaseError
    return kind(str(error), info=info)
