"""Finds the driver's connection behind the asynchronous connection or session that a caller gives, and joins its
transaction. For code that `bridge` runs."""

from __future__ import annotations

import inspect
from typing import Any, cast

import psycopg

from custody.bridge import awaited
from custody.errors import InvalidArgument
from custody.store.asyncpg_connection import is_asyncpg, run_asyncpg
from custody.store.bridged import BridgedConnection
from custody.store.postgres import Connection, Row, run_function, translated

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
        or is_asyncpg(connection)
    )


def _is_async_connection(connection: Any) -> bool:
    return inspect.iscoroutinefunction(getattr(type(connection), "get_raw_connection", None))


def _is_async_session(connection: Any) -> bool:
    return inspect.iscoroutinefunction(getattr(type(connection), "connection", None))


def async_joined(connection: Any) -> Connection:
    """The driver's connection, in the transaction of the caller."""
    driver, _ = _driver_of(connection)
    if is_asyncpg(driver):
        raise InvalidArgument(
            "only the outbox takes a connection of asyncpg, which has no binary parameters of ours", REMEDY
        )
    return cast("Connection", BridgedConnection(driver))


def run_async_joined(connection: Any, function: str, arguments: dict[str, Any]) -> list[Row]:
    """Calls an SQL function that needs no binary parameters in the caller's transaction: on asyncpg, too."""
    driver, found = _driver_of(connection)
    if is_asyncpg(driver):
        return run_asyncpg(found, function, arguments)
    with translated():
        return run_function(cast("Connection", BridgedConnection(driver)), function, arguments)


def _driver_of(connection: Any) -> tuple[Any, Any]:
    """The driver's connection, and the given one or that of the given session."""
    if isinstance(connection, psycopg.AsyncConnection) or is_asyncpg(connection):
        return connection, connection
    if not is_async(connection):
        raise InvalidArgument(
            f"{type(connection).__name__} is no asynchronous connection, and would block the event loop",
            f"{REMEDY} {BLOCKING}",
        )
    found = awaited(connection.connection()) if _is_async_session(connection) else connection
    driver: Any = awaited(found.get_raw_connection()).driver_connection
    if not isinstance(driver, psycopg.AsyncConnection) and not is_asyncpg(driver):
        raise InvalidArgument(
            f"this {type(connection).__name__} uses {type(driver).__module__.partition('.')[0]}, not psycopg", REMEDY
        )
    if not found.in_transaction():
        awaited(found.begin())  # otherwise its commit would do nothing, because it does not know of our statements
    return driver, found
