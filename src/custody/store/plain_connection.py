"""Calls SQL functions on a connection of psycopg2, which an application may have instead of psycopg 3.

psycopg2 puts the values into the statement as text. That is enough for writing to the outbox.
"""

from __future__ import annotations

import sys
from typing import Any
from uuid import UUID

import psycopg
from psycopg.pq import DiagnosticField

from custody.store.postgres import Row, call_text, translate

_DIAGNOSTICS = {
    DiagnosticField.SQLSTATE: "sqlstate",
    DiagnosticField.MESSAGE_PRIMARY: "message_primary",
    DiagnosticField.MESSAGE_DETAIL: "message_detail",
    DiagnosticField.MESSAGE_HINT: "message_hint",
    DiagnosticField.CONSTRAINT_NAME: "constraint_name",
    DiagnosticField.COLUMN_NAME: "column_name",
}


def is_psycopg2(connection: Any) -> bool:
    """Whether it is a connection of psycopg2, without importing that."""
    extensions = sys.modules.get("psycopg2.extensions")
    return extensions is not None and isinstance(connection, extensions.connection)


def run_plain(connection: Any, function: str, arguments: dict[str, Any]) -> list[Row]:
    """Calls an SQL function; returns its rows."""
    psycopg2 = sys.modules["psycopg2"]
    values = [str(value) if isinstance(value, UUID) else value for value in arguments.values()]
    try:
        # a cursor of the plain class, whatever the cursor factory of the connection
        with psycopg2.extensions.cursor(connection) as cursor:
            cursor.execute(call_text(function, tuple(arguments)), values)
            return list(cursor.fetchall())
    except psycopg2.Error as error:
        raise translate(_as_psycopg(error)) from error


def _as_psycopg(error: Any) -> psycopg.Error:
    """The same error as psycopg 3 would raise it, so that one place translates both."""
    info = {field: getattr(error.diag, name) for field, name in _DIAGNOSTICS.items()}
    encoded = {int(field): None if text is None else text.encode() for field, text in info.items()}
    try:
        kind = psycopg.errors.lookup(error.pgcode or "")
    except KeyError:
        # the classes of the DB-API have the same names in both
        names = (base.__name__ for base in type(error).__mro__)
        kind = next(getattr(psycopg, name) for name in names if hasattr(psycopg, name))
    return kind(str(error).strip(), info=encoded if error.pgcode else None)
