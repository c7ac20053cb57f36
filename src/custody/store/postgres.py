"""The one place that talks to PostgreSQL: a pool, calls of SQL functions, and errors turned into ours.

Verbs are SQL functions; Python only calls them. No SQL text is built from values here or anywhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg_errors
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import RowFactory, dict_row, tuple_row
from psycopg_pool import ConnectionPool, PoolTimeout

from custody.errors import (
    Busy,
    CustodyError,
    DatabaseUnavailable,
    InvalidArgument,
    InvalidConfig,
    LeaseLost,
    by_code,
    key_too_long,
)
from custody.store.connecting import BoundedConnection

PING = 5.0
Connection = psycopg.Connection[Any]
Row = tuple[Any, ...]
T = TypeVar("T")

_ERRORS = by_code()


@lru_cache(maxsize=512)
def _call(function: str, arguments: tuple[str, ...], binary: tuple[bool, ...]) -> bytes:
    """`SELECT * FROM custody.function(p_a => %s, …)`, once for each shape of a call."""
    call = sql.SQL("SELECT * FROM {}({})").format(
        sql.Identifier("custody", function),
        sql.SQL(", ").join(
            sql.SQL("{} => {}").format(sql.Identifier(f"p_{name}"), sql.SQL("%b" if as_binary else "%s"))
            for name, as_binary in zip(arguments, binary, strict=True)
        ),
    )
    return call.as_bytes(None)


@lru_cache(maxsize=64)
def _select(view: str, conditions: tuple[str, ...], order: tuple[str, ...], limited: bool) -> sql.Composed:
    return sql.SQL("SELECT * FROM {} WHERE {} ORDER BY {}{}").format(
        sql.Identifier("custody", view),
        sql.SQL(" AND ").join([sql.SQL("true"), *(sql.SQL("{} = %s").format(sql.Identifier(n)) for n in conditions)]),
        sql.SQL(", ").join(map(sql.Identifier, order)),
        sql.SQL(" LIMIT %s" if limited else ""),
    )


def _is_binary(value: object) -> bool:
    return isinstance(value, list)


@contextmanager
def translated() -> Iterator[None]:
    """Turns the driver's errors into ours: a refusal by its code, a lost connection as transient."""
    try:
        yield
    except PoolTimeout as error:
        raise DatabaseUnavailable(
            "there was no connection to the database in time", "Check that it runs, and the size of the pool."
        ) from error
    except psycopg.Error as error:
        raise translate(error) from error


def translate(error: psycopg.Error) -> CustodyError:
    if error.sqlstate == "CY000":
        known = _ERRORS.get(error.diag.message_detail or "", CustodyError)
        why, remedy = error.diag.message_primary, error.diag.message_hint or ""
        if known is LeaseLost:
            lost = [int(offset) for offset in (error.diag.column_name or "").split(",") if offset]
            return LeaseLost(why, remedy, lost=lost)
        return known(why, remedy)
    if isinstance(error, pg_errors.CheckViolation) and error.diag.constraint_name == "key_length":
        return key_too_long()
    if isinstance(
        error, pg_errors.ProgramLimitExceeded
    ):  # an operational error for the driver, but it would be one again
        return InvalidArgument(_said(error))
    refused_by_driver = isinstance(error, pg_errors.ProgrammingError) and error.sqlstate is None
    if isinstance(error, pg_errors.IntegrityError):
        return InvalidArgument(_said(error)).showing("the database does not take it")
    if refused_by_driver or isinstance(error, pg_errors.DataError):
        return InvalidArgument(_said(error))
    if isinstance(error, pg_errors.UndefinedTable) and "custody.log_" in str(error):
        return Busy("the segment of the log that was to be read was dropped meanwhile", "Try again.")
    if isinstance(error, pg_errors.LockNotAvailable | pg_errors.DeadlockDetected | pg_errors.QueryCanceled):
        said = "the database gave up waiting"
        return Busy(f"{said}: {_said(error)}", "Try again.").showing(said)
    if isinstance(error, pg_errors.ReadOnlySqlTransaction):
        said = "the database takes no changes"
        remedy = "After a failover it is a standby: try again. It may also have default_transaction_read_only set."
        return DatabaseUnavailable(f"{said}: {_said(error)}", remedy).showing(said)
    if "unsupported startup parameter" in str(error):
        return InvalidConfig(
            f"the connection pooler refuses a setting of the connection: {str(error).strip()}",
            "Leave it out of the URL (`options` is PGOPTIONS too): set it for the role with ALTER ROLE … SET. "
            "Or add it to ignore_startup_parameters of the pooler.",
        )
    if "statement pooling mode" in str(error):
        return InvalidConfig(
            f"the connection pooler takes no transactions: {str(error).strip()}",
            "Set pool_mode = transaction (or session) for this database in the pooler.",
        )
    if isinstance(error, pg_errors.OperationalError | pg_errors.InterfaceError):
        said = "the database cannot be reached"
        remedy = "Check that it runs, and try again."
        return DatabaseUnavailable(f"{said}: {_said(error)}", remedy).showing(said)
    remedy = ""
    if isinstance(error, pg_errors.InsufficientPrivilege):
        remedy = "Grant the right to the role, or connect as the owner of the schema custody."
    return CustodyError(f"the database reported: {str(error).strip()}", remedy).showing(
        "the database reported an error"
    )


def _said(error: psycopg.Error) -> str:
    """The server's message, without the statements of our functions in which it happened; or the driver's."""
    return error.diag.message_primary or str(error).strip()


def without_own_passwords(url: str) -> str:
    """A URL for a server that somebody else names: it gets the password in the URL, if there is one, and none that
    libpq would find by itself (PGPASSWORD, a password file)."""
    with translated():
        given = conninfo_to_dict(url)
        return make_conninfo(url, password=given.get("password", ""), passfile="/nonexistent/passwords")


class Database:
    """A pool of connections to one database. Safe for use by many threads."""

    def __init__(
        self, url: str, *, pool_size: int = 10, timeout: float = 10.0, statement_timeout: float | None = None
    ) -> None:
        """`statement_timeout`, in seconds: a call that takes longer is given up, and is `Busy`."""
        self.url = url
        settings = {"autocommit": True, "application_name": "custody", "statement_timeout": statement_timeout}
        self._pool: ConnectionPool[BoundedConnection] = ConnectionPool(
            url,
            min_size=1,
            max_size=pool_size,
            timeout=timeout,
            open=False,
            kwargs=settings,
            connection_class=BoundedConnection,
            check=self._require_open,
            # after that it waits for somebody to ask: its pauses between two attempts only get longer
            reconnect_timeout=timeout,
        )
        with translated():
            # the pool would try for long and say little
            with BoundedConnection.connect(url, **settings) as first:
                self.pooled, self.isolation_default = first.pooled, first.isolation_default
                if first.pooled:
                    with first.transaction():  # refused in statement mode
                        first.execute("SELECT 1")
            self._pool.open(wait=True, timeout=timeout)

    def _require_open(self, connection: BoundedConnection) -> None:
        """Refuses a connection that the server has closed while nobody used it (a restart, idle_session_timeout). The
        others in the pool go with it, so that the next one is new."""
        if connection.stale:
            connection.close()
            self._pool.drain()
            raise psycopg.OperationalError("the server has closed it")

    def close(self) -> None:
        self._pool.close()

    def connections(self) -> tuple[int, int, int, int]:
        """Connections in use, idle, and at most; and how many calls wait for one."""
        stats = self._pool.get_stats()
        idle = stats["pool_available"]
        return stats["pool_size"] - idle, idle, stats["pool_max"], stats.get("requests_waiting", 0)

    @contextmanager
    def connection(self, *, within: float | None = None) -> Iterator[Connection]:
        """A connection of the pool, in autocommit mode. After a lost connection the pool is cleared of its like.

        `within`: so many seconds are waited for it, and for each answer."""
        with translated(), self._pool.connection(timeout=within) as connection:
            try:
                if within is not None:
                    with connection.answering(within):
                        yield connection
                elif connection.names_level:
                    with connection.level():
                        yield connection
                else:
                    yield connection
            except pg_errors.ReadOnlySqlTransaction:
                connection.close()  # to a standby: the next one may be to its primary
                raise
            except (pg_errors.OperationalError, pg_errors.InterfaceError):
                if connection.closed:
                    self._pool.drain()
                raise

    def ping(self, within: float = PING) -> None:
        """Raises if the database does not answer in that time."""
        with self.connection(within=within) as connection:
            connection.execute("SELECT 1")

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        with self.connection() as connection, connection.transaction():
            yield connection

    def call(self, function: str, /, *, on: Connection | None = None, **arguments: Any) -> list[Row]:
        """One SQL function, one round trip: its rows."""
        if on is not None:
            with translated():
                return _execute(on, tuple_row, function, arguments)
        with self.connection() as connection:
            return _execute(connection, tuple_row, function, arguments)

    def call_dicts(self, function: str, /, *, on: Connection | None = None, **arguments: Any) -> list[dict[str, Any]]:
        """The same, each row as a mapping."""
        if on is not None:
            with translated():
                return _execute(on, dict_row, function, arguments)
        with self.connection() as connection:
            return _execute(connection, dict_row, function, arguments)

    def select(
        self, view: str, /, *, order: Sequence[str], limit: int | None = None, **conditions: Any
    ) -> list[dict[str, Any]]:
        """Rows of a view or table whose columns equal the conditions."""
        values = [*conditions.values(), *([limit] if limit is not None else [])]
        # in binary: text has the styles of the session
        with self.connection() as connection, connection.cursor(binary=True, row_factory=dict_row) as cursor:
            cursor.execute(_select(view, tuple(conditions), tuple(order), limit is not None), values)
            return cursor.fetchall()


def run_function(connection: Connection, function: str, arguments: dict[str, Any]) -> list[Row]:
    """One SQL function on a connection: its rows."""
    return _execute(connection, tuple_row, function, arguments)


def _execute(connection: Connection, factory: RowFactory[T], function: str, arguments: dict[str, Any]) -> list[T]:
    values = list(arguments.values())
    query = _call(function, tuple(arguments), tuple(map(_is_binary, values)))
    with connection.cursor(binary=True, row_factory=factory) as cursor:
        cursor.execute(query, values)
        try:
            return cursor.fetchall()
        except pg_errors.DataError as error:  # the driver's: the call itself has been done, and must not be repeated
            said = "it was done, but what it returned cannot be read"
            raise DatabaseUnavailable(f"{said}: {error}").showing(said) from error
