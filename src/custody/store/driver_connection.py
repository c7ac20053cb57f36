"""Finds the psycopg connection behind the connection or session that a caller gives."""

from __future__ import annotations

from typing import Any

import psycopg

from custody.errors import InvalidArgument
from custody.store.postgres import Connection


def driver_connection(connection: Any) -> Connection:
    """The psycopg connection of the caller's transaction: the given one, or that of a SQLAlchemy connection or session.
    The caller commits it."""
    if isinstance(connection, psycopg.Connection):
        return connection
    # without importing SQLAlchemy: a session has a method of this name, a connection an attribute
    found = connection.connection() if callable(getattr(connection, "connection", None)) else connection
    driver = getattr(getattr(found, "connection", None), "driver_connection", None)
    if not isinstance(driver, psycopg.Connection):
        raise InvalidArgument(
            f"{type(connection).__name__} is not a connection of psycopg, nor one of SQLAlchemy that uses psycopg",
            "Give a psycopg.Connection, or one of create_engine('postgresql+psycopg://…'); not an asynchronous one.",
        )
    if not found.in_transaction():
        found.begin()  # otherwise its commit would do nothing, because it does not know of our statements
    return driver
