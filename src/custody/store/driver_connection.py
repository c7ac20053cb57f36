"""Finds the driver's connection behind the connection or session that a caller gives, and joins its transaction.

Statements run on a cursor of our own on that connection: a cursor of the caller's class (Django's) may interpolate
parameters, log them, or convert rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from custody.bridge import bridged
from custody.errors import InvalidArgument
from custody.store.async_driver_connection import async_joined, is_async, run_async_joined
from custody.store.plain_connection import is_psycopg2, run_plain
from custody.store.postgres import Connection, Row, run_function, translated

REMEDY = (
    "Give a psycopg.Connection, one of create_engine('postgresql+psycopg://…'), or django.db.connection (psycopg 3)."
)
ASYNC = (
    "Use custody.aio: `await custody.aio.outbox.write(…)`, `await custody.aio.once(…)`, or a lease of "
    "custody.aio.connect(), with `await lease.ack(connection=…)`."
)
PSYCOPG2 = "Open the connection with psycopg 3 (`import psycopg`, or `postgresql+psycopg://` for SQLAlchemy)."


@contextmanager
def joined(connection: Any) -> Iterator[Connection]:
    """A context with the psycopg connection of the caller's transaction: the given one, or that of a SQLAlchemy
    connection or session, or Django's. The caller commits it."""
    if bridged():
        yield async_joined(connection)
        return
    driver = _driver_of(connection)
    if is_psycopg2(driver):
        raise InvalidArgument(
            "only the outbox takes a connection of psycopg2, which has no binary parameters",
            PSYCOPG2,
        )
    if not isinstance(driver, psycopg.Connection):
        raise _refused(connection)
    try:
        yield driver
    except BaseException as error:
        _tell_django(connection, driver, error)
        raise


def run_joined(connection: Any, function: str, arguments: dict[str, Any]) -> list[Row]:
    """Calls an SQL function that needs no binary parameters in the caller's transaction: on psycopg2 and asyncpg,
    too."""
    if bridged():
        return run_async_joined(connection, function, arguments)
    driver = _driver_of(connection)
    if is_psycopg2(driver):
        return run_plain(driver, function, arguments)
    with joined(connection) as on, translated():
        return run_function(on, function, arguments)


def _driver_of(connection: Any) -> Any:
    """The driver's connection, in the transaction of the caller."""
    if isinstance(connection, psycopg.Connection) or is_psycopg2(connection):
        return connection
    if _is_django(connection):
        return _driver_of_django(connection)
    if is_async(connection):
        raise InvalidArgument(f"{type(connection).__name__} is asynchronous, and this call is blocking", ASYNC)
    # without importing SQLAlchemy: a session has a method of this name, a connection an attribute
    found = connection.connection() if callable(getattr(connection, "connection", None)) else connection
    driver = getattr(getattr(found, "connection", None), "driver_connection", None)
    if isinstance(driver, psycopg.AsyncConnection):  # in run_sync of an AsyncSession
        raise InvalidArgument("this connection is asynchronous, and this call is blocking", ASYNC)
    if not isinstance(driver, psycopg.Connection) and not is_psycopg2(driver):
        raise _refused(connection)
    if not found.in_transaction():
        found.begin()  # otherwise its commit would do nothing, because it does not know of our statements
    return driver


def _refused(connection: Any) -> InvalidArgument:
    return InvalidArgument(
        f"{type(connection).__name__} is not a connection of psycopg, nor one of SQLAlchemy or Django that uses it",
        REMEDY,
    )


def _is_django(connection: Any) -> bool:
    """Whether it is django.db.connection or one of django.db.connections; without importing Django."""
    return all(hasattr(connection, name) for name in ("ensure_connection", "in_atomic_block", "settings_dict"))


def _driver_of_django(connection: Any) -> Any:
    if connection.vendor != "postgresql":
        raise InvalidArgument(
            f"Django's database {connection.alias!r} is {connection.display_name}, not PostgreSQL",
            "Give the connection of a PostgreSQL database: django.db.connections['…'].",
        )
    connection.ensure_connection()
    if connection.get_autocommit():
        raise InvalidArgument(
            f"Django's connection {connection.alias!r} is in autocommit mode: this would be committed at once, "
            "whatever becomes of your own change",
            "Call it inside `with transaction.atomic():`, or set ATOMIC_REQUESTS.",
        )
    connection.validate_no_broken_transaction()
    return connection.connection


def _tell_django(connection: Any, driver: Connection, error: BaseException) -> None:
    """Django does not see our statements: after one that failed, it has to know that only a rollback is left.
    Otherwise a caller that catches the error would commit nothing, without an error."""
    if not _is_django(connection) or not connection.in_atomic_block:
        return
    if driver.info.transaction_status != TransactionStatus.INTRANS:
        connection.set_rollback(True)
        connection.rollback_exc = error
