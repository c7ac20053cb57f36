"""Finds the driver's connection behind the asynchronous connection or session that a caller gives, and joins its
transaction. For code that `bridge` runs."""

from __future__ import annotations

import inspect
from typing import Any

import psycopg

from custody.bridge import awaited
from custody.errors import InvalidArgument

REMEDY = (
    "Give a psycopg.AsyncConnection, or an AsyncConnection or AsyncSession of "
    "create_async_engine('postgresql+psycopg://…')."
)
BLOCKING = "Use what `import custody` has, outside of the event loop, or open an asynchronous connection."


def is_async(connection: Any) -> bool:
    """Whether it is a connection or session of asyncio; without importing SQLAlchemy."""
    return (
        isinstance(connection, psycopg.AsyncConnection)
        or _is_async_connection(connection)
        or _is_async_session(connection)
        or type(connection).__module__.partition(".")[0] == "asyncpg"
    )


def _is_async_connection(connection: Any) -> bool:
    return inspect.iscoroutinefunction(getattr(type(connection), "get_raw_connection", None))


def _is_async_session(connection: Any) -> bool:
    return inspect.iscoroutinefunction(getattr(type(connection), "connection", None))


def async_driver_of(connection: Any) -> psycopg.AsyncConnection[Any]:
    """The driver's connection, in the transaction of the caller."""
    if isinstance(connection, psycopg.AsyncConnection):
        return connection
    if not is_async(connection):
        raise InvalidArgument(
            f"{type(connection).__name__} is no asynchronous connection, and would block the event loop",
            f"{REMEDY} {BLOCKING}",
        )
    found = awaited(connection.connection()) if _is_async_session(connection) else connection
    driver: Any = connection
    if _is_async_connection(found):
        driver = awaited(found.get_raw_connection()).driver_connection
    if not isinstance(driver, psycopg.AsyncConnection):
        raise InvalidArgument(
            f"this {type(connection).__name__} uses {type(driver).__module__.partition('.')[0]}, not psycopg", REMEDY
        )
    if not found.in_transaction():
        awaited(found.begin())  # otherwise its commit would do nothing, because it does not know of our statements
    return driver
