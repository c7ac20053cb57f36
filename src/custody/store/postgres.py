"""Access to PostgreSQL: a pool, calls of SQL functions, and translation of errors.

Verbs are SQL functions; Python only calls them. No SQL text is built from values here or anywhere else.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Self, TypeVar, cast

import psycopg
from psycopg import errors as pg_errors
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import AsyncRowFactory, RowFactory, dict_row, tuple_row
from psycopg_pool import ConnectionPool, PoolTimeout

from custody.errors import (
    Busy,
    CustodyError,
    DatabaseUnavailable,
    InvalidArgument,
    InvalidConfig,
    LeaseLost,
    PermissionDenied,
    SchemaChanged,
    by_code,
    key_too_long,
)
from custody.store.bridged import BridgedConnection
from custody.store.connecting import BoundedConnection
from custody.store.functions import RELEASE, columns_of, parameters_of
from custody.store.interfaces import interface, known_to
from custody.store.packed import Packed

PING = 5.0
ALONE = "outbox_"
"""Functions that may be in a database without the rest of Custody, which has another ledger."""
Connection = psycopg.Connection[Any]
Row = tuple[Any, ...]
T = TypeVar("T")

_ERRORS = by_code()
_REFUSED = {
    "password authentication failed": "Check user and password of the URL.",
    "no password supplied": "Give a password: in the URL, PGPASSWORD, or ~/.pgpass.",
    "no pg_hba.conf entry": "Admit this user and address in pg_hba.conf of the server.",
    "does not exist": "Check the name in the URL, or create it: createdb, createuser.",
    "resolve host": "Check the host of the URL.",
}.items()
"""What to do if a server refuses a connection, by a part of its message. In another language it is the usual remedy."""
_CHANGED = (
    pg_errors.UndefinedFunction,
    pg_errors.UndefinedTable,
    pg_errors.UndefinedColumn,
    pg_errors.FeatureNotSupported,  # a prepared statement whose columns are others now
)
_DROPPED = re.compile(
    r'(relation "custody\.log_\d+"|function custody\.(slices|keys)_\d+\(.*\)|type "?custody\.log_\d+"?) does not exist'
    r"|cache lookup failed for function|could not open relation with OID"
)
"""A table of a segment, or a function that reads it, was there when the statement began."""


@lru_cache(maxsize=512)
def _call(function: str, arguments: tuple[str, ...], binary: tuple[bool, ...]) -> bytes:
    """`SELECT columns FROM custody.function(p_a => %s, …)`, cached for each set of arguments.

    It names the columns, because a newer schema may have more. It reads the ledger first: so a call during a migration
    waits for its end before it looks for the function, and no migration changes functions before the transaction ends.
    """
    row = sql.Identifier(function)
    columns: list[sql.Composable] = [sql.Identifier(function, name) for name in columns_of(function)]
    call = sql.SQL("SELECT {} FROM {}{}({}) {}").format(
        sql.SQL(", ").join(columns or [sql.SQL("{}.*").format(row)]),
        sql.SQL("" if function.startswith(ALONE) else "(SELECT FROM custody.release LIMIT 1) ledger, "),
        sql.Identifier("custody", function),
        sql.SQL(", ").join(
            sql.SQL("{} => {}").format(sql.Identifier(f"p_{name}"), sql.SQL("%b" if as_binary else "%s"))
            for name, as_binary in zip(arguments, binary, strict=True)
        ),
        row,
    )
    return call.as_bytes(None)


def call_text(function: str, arguments: tuple[str, ...]) -> bytes:
    """The call of an SQL function with all parameters as text."""
    return _call(function, arguments, (False,) * len(arguments))


@lru_cache(maxsize=64)
def call_numbered(function: str, arguments: tuple[str, ...]) -> str:
    """The call of an SQL function with the parameters $1, $2 …"""
    call = sql.SQL("SELECT * FROM {}({})").format(
        sql.Identifier("custody", function),
        sql.SQL(", ").join(
            sql.SQL("{} => ${}").format(sql.Identifier(f"p_{name}"), sql.Literal(number))
            for number, name in enumerate(arguments, 1)
        ),
    )
    return call.as_string(None)


@lru_cache(maxsize=64)
def _select(view: str, conditions: tuple[str, ...], order: tuple[str, ...], limited: bool) -> sql.Composed:
    return sql.SQL("SELECT * FROM {} WHERE {} ORDER BY {}{}").format(
        sql.Identifier("custody", view),
        sql.SQL(" AND ").join([sql.SQL("true"), *(sql.SQL("{} = %s").format(sql.Identifier(n)) for n in conditions)]),
        sql.SQL(", ").join(map(sql.Identifier, order)),
        sql.SQL(" LIMIT %s" if limited else ""),
    )


@lru_cache(maxsize=512)
def _injected(function: str) -> tuple[str, ...]:
    """Which of the parameters that every call has a function takes."""
    return tuple(name for name in parameters_of(function) if name in ("now", "worker", "actor"))


def _is_binary(value: object) -> bool:
    return isinstance(value, list | bytes | Packed)


@contextmanager
def translated() -> Iterator[None]:
    """Translates the driver's errors into ours: a refusal by its code, a lost connection as transient."""
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
    ):  # the driver calls it operational, but a retry would fail again
        return InvalidArgument(_said(error))
    refused_by_driver = isinstance(error, pg_errors.ProgrammingError) and error.sqlstate is None
    if isinstance(error, pg_errors.IntegrityError):
        return InvalidArgument(_said(error)).showing("the database refuses the value")
    if refused_by_driver or isinstance(error, pg_errors.DataError):
        return InvalidArgument(_said(error))
    # A position in the statement: the function that it calls, or its type, went while the statement was parsed.
    parsing = isinstance(error, pg_errors.InternalError_) and error.diag.statement_position is not None
    if _DROPPED.search(_said(error)) and not parsing:
        return Busy("a segment of the log was dropped while it was read", "Try again.")
    changed = isinstance(error, _CHANGED) and ("custody." in _said(error) or "cached plan" in _said(error))
    if changed or (parsing and _said(error).startswith("cache lookup failed")):
        said = "the schema was migrated, or is not that of this code"
        return SchemaChanged(f"{said}: {_said(error)}", "Try again; then connect anew.").showing(said)
    if isinstance(error, pg_errors.LockNotAvailable | pg_errors.DeadlockDetected | pg_errors.QueryCanceled):
        said = "the database cancelled a wait"
        return Busy(f"{said}: {_said(error)}", "Try again.").showing(said)
    if isinstance(error, pg_errors.ReadOnlySqlTransaction):
        said = "the database is read-only"
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
            f"the connection pooler does not support transactions: {str(error).strip()}",
            "Set pool_mode = transaction (or session) for this database in the pooler.",
        )
    if isinstance(error, pg_errors.OperationalError | pg_errors.InterfaceError):
        said, reason = "the database cannot be reached", _said(error)
        remedy = next((mend for mark, mend in _REFUSED if mark in reason), "Check that it runs, and try again.")
        return DatabaseUnavailable(f"{said}: {reason}", remedy).showing(said)
    if isinstance(error, pg_errors.InsufficientPrivilege):
        said = "the role of the database lacks a right"
        remedy = (
            "Run `custody migrate` once as the owner of the database: it has no schema custody yet."
            if "permission denied for database" in _said(error)
            else "Connect as a role that has it, or give it with `custody grants` as the owner of the schema custody."
        )
        return PermissionDenied(f"{said}: {_said(error)}", remedy).showing(said)
    return CustodyError(f"the database reported: {str(error).strip()}").showing("the database reported an error")


def _said(error: psycopg.Error) -> str:
    """The server's message, without the context of our functions; otherwise the driver's."""
    return error.diag.message_primary or " ".join(str(error).split())


def without_own_passwords(url: str) -> str:
    """Restricts a URL that somebody else gave to the password in it, so that libpq does not send one that it finds
    itself (PGPASSWORD, a password file)."""
    with translated():
        given = conninfo_to_dict(url)
        return make_conninfo(url, password=given.get("password", ""), passfile="/nonexistent/passwords")


@dataclass
class Schema:
    """The release of a database's schema, and what reads it. All copies of a `Database` share it."""

    release: int = RELEASE
    release_of: Callable[[Connection], int] | None = None


class Database:
    """A pool of connections to one database. Safe for use by many threads.

    A call gets the name of whoever acts (`worker`, `actor`) and the time (`now`) if its function takes them. Without a
    clock the time is PostgreSQL's.
    """

    pooled: bool
    isolation_default: str
    _pool: ConnectionPool[BoundedConnection]

    def __init__(
        self, url: str, *, pool_size: int = 10, timeout: float = 10.0, statement_timeout: float | None = None
    ) -> None:
        """`statement_timeout`, in seconds: a call that takes longer is cancelled, and raises `Busy`."""
        self.url = url
        self.worker: str | None = None
        self.clock: Callable[[], datetime] | None = None
        self._schema = Schema()
        settings = {"autocommit": True, "application_name": "custody", "statement_timeout": statement_timeout}
        with translated():
            self._open(
                settings,
                conninfo=url,
                min_size=1,
                max_size=pool_size,
                timeout=timeout,
                open=False,
                kwargs=settings,
                # then it stops, and reconnects on the next request: its pauses between attempts only get longer
                reconnect_timeout=timeout,
            )

    def _open(self, settings: dict[str, Any], **pool: Any) -> None:
        self._pool = ConnectionPool(connection_class=BoundedConnection, check=self._require_open, **pool)
        # a first connection without the pool, which would retry for long and report little
        with BoundedConnection.connect(self.url, **settings) as first:
            self.pooled, self.isolation_default = first.pooled, first.isolation_default
            if first.pooled:
                with first.transaction():  # refused in statement mode
                    first.execute("SELECT 1")
        self._pool.open(wait=True, timeout=pool["timeout"])

    def _require_open(self, connection: BoundedConnection) -> None:
        """Refuses a connection that the server has closed while it was idle (a restart, idle_session_timeout). Drains
        the pool too, so that the next connection is new."""
        if connection.stale:
            connection.close()
            self._pool.drain()
            raise psycopg.OperationalError("the server has closed it")

    def _borrowed(self, within: float | None) -> AbstractContextManager[BoundedConnection]:
        """A connection for the time of a block."""
        return self._pool.connection(timeout=within)

    def _drain(self) -> None:
        self._pool.drain()

    def acting(self, worker: str | None, clock: Callable[[], datetime] | None) -> Self:
        """The same pool, for calls under this name and with this clock."""
        other = copy.copy(self)
        other.worker, other.clock = worker, clock
        return other

    def require(self, release_of: Callable[[Connection], int]) -> Self:
        """Checks the schema now, and whenever it has changed. The check returns the release of the database, or refuses
        it, which closes the pool."""
        self._schema.release_of = release_of
        try:
            self._look()
        except BaseException:
            self.close()
            raise
        return self

    def _look(self) -> None:
        if self._schema.release_of is not None:
            with self.connection() as connection:
                self._schema.release = self._schema.release_of(connection)

    def has(self, function: str) -> bool:
        """Whether the database has a function of this release; an older one may lack it."""
        return self._schema.release >= RELEASE or function in interface(self._schema.release)

    def close(self) -> None:
        self._pool.close()

    def connections(self) -> tuple[int, int, int, int]:
        """Connections in use, idle, the limit, and how many calls wait for one."""
        stats = self._pool.get_stats()
        idle = stats["pool_available"]
        return stats["pool_size"] - idle, idle, stats["pool_max"], stats.get("requests_waiting", 0)

    @contextmanager
    def connection(self, *, within: float | None = None) -> Iterator[Connection]:
        """A connection of the pool, in autocommit mode. After a lost connection the pool is drained.

        `within`: the timeout in seconds for the connection, and for each answer."""
        with translated(), self._borrowed(within) as connection:
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
                connection.close()  # it leads to a standby; a new one may lead to the primary
                raise
            except _CHANGED:
                self._drain()  # what they have prepared is of the older schema
                raise
            except (pg_errors.OperationalError, pg_errors.InterfaceError):
                if connection.closed:
                    self._drain()
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
        """Calls an SQL function in one round trip; returns its rows."""
        return self._run(function, tuple_row, on, arguments)

    def call_dicts(self, function: str, /, *, on: Connection | None = None, **arguments: Any) -> list[dict[str, Any]]:
        """As `call`, with each row as a mapping."""
        return self._run(function, dict_row, on, arguments)

    def _run(self, function: str, factory: RowFactory[T], on: Connection | None, arguments: dict[str, Any]) -> list[T]:
        for name in _injected(function):
            if name != "now":
                arguments.setdefault(name, self.worker)
            elif self.clock is not None:
                arguments.setdefault(name, self.clock())
        if self._schema.release < RELEASE:
            arguments = known_to(self._schema.release, function, arguments)
        if on is not None:
            try:
                with translated():
                    return _execute(on, factory, function, arguments)
            except SchemaChanged:
                self._look()  # refuses a schema that does not work with this code any more
                raise
        try:
            with self.connection() as connection:
                return _execute(connection, factory, function, arguments)
        except SchemaChanged:  # nothing took effect
            self._look()
            with self.connection() as connection:
                return _execute(connection, factory, function, arguments)

    def select(
        self, view: str, /, *, order: Sequence[str], limit: int | None = None, **conditions: Any
    ) -> list[dict[str, Any]]:
        """Rows of a view or table whose columns equal the conditions."""
        values = [*conditions.values(), *([limit] if limit is not None else [])]
        # in binary format, because text depends on the settings of the session
        query = _select(view, tuple(conditions), tuple(order), limit is not None)
        try:
            return self._selected(query, values)
        except SchemaChanged:
            self._look()
            return self._selected(query, values)

    def _selected(self, query: sql.Composed, values: list[Any]) -> list[dict[str, Any]]:
        with self.connection() as connection, connection.cursor(binary=True, row_factory=dict_row) as cursor:
            cursor.execute(query, values)
            return cursor.fetchall()


def own_cursor(connection: Any, factory: RowFactory[T]) -> psycopg.Cursor[T]:
    """A cursor of psycopg's own class: one of the connection's may interpolate parameters (ClientCursor)."""
    if isinstance(connection, BridgedConnection):
        return cast("psycopg.Cursor[T]", connection.own_cursor(cast("AsyncRowFactory[T]", factory)))
    return psycopg.Cursor(connection, row_factory=factory)


def run_function(connection: Connection, function: str, arguments: dict[str, Any]) -> list[Row]:
    """Calls an SQL function on a connection; returns its rows."""
    return _execute(connection, tuple_row, function, arguments)


def _execute(connection: Connection, factory: RowFactory[T], function: str, arguments: dict[str, Any]) -> list[T]:
    values = list(arguments.values())
    query = _call(function, tuple(arguments), tuple(map(_is_binary, values)))
    with own_cursor(connection, factory) as cursor:
        cursor.execute(query, values, binary=True)
        try:
            return cursor.fetchall()
        except (
            pg_errors.DataError
        ) as error:  # raised by the driver: the call has taken effect, and must not be repeated
            said = "the call took effect, but its result cannot be read"
            raise DatabaseUnavailable(f"{said}: {error}").showing(said) from error
