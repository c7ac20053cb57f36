"""The caller's own transaction: what it gives us, and the driver's connection behind it."""

from __future__ import annotations

from typing import Any

import psycopg

from custody.errors import InvalidArgument
from custody.store.postgres import Connection


def driver_connection(connection: Any) -> Connection:
    """The connection of psycopg in whose transaction the caller is: its own, or that of a SQLAlchemy connection or
    session. Whoever gave it commits it."""
    if isinstance(connection, psycopg.Connection):
        return connection
    # SQLAlchemy is not imported for it: a session has a method of this name, a connection an attribute
    found = connection.connection() if callable(getattr(connection, "connection", None)) else connection
    driver = getattr(getattr(found, "connection", None), "driver_connection", None)
    if not isinstance(driver, psycopg.Connection):
        raise InvalidArgument(
            f"{type(connection).__name__} is no connection of psycopg, nor one of SQLAlchemy that uses it",
            "Give a psycopg.Connection, or one of create_engine('postgresql+psycopg://…'); not an asynchronous one.",
        )
    if not found.in_transaction():
        found.begin()  # else its commit would do nothing, since it does not know of what we send
    return driver
