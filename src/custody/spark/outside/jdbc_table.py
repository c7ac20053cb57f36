"""A table of a database that people use, as a pipeline writes to it: staged rows, and the claims that are written.

PostgreSQL takes rows by COPY, other databases by INSERT. Runs in the driver.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import sqlalchemy as sa
from psycopg import sql
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SAWarning, SQLAlchemyError, StatementError
from sqlalchemy.schema import CreateTable

from custody.errors import PipelineFailed
from custody.spark.outside.sinks import OWN, SinkDown, Write

_DRIVERS = {"postgres": "postgresql+psycopg", "postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql",
            "mariadb": "mariadb+pymysql"}  # fmt: skip
_WRONG_DATA, _PASSES = ("22", "23", "44"), ("08", "40", "53", "55", "57")
"""Classes of SQLSTATE: invalid data or a constraint; and what passes: no connection, a conflict, a lock, a shutdown."""
_WRONG_MYSQL, _PASSES_MYSQL = (1264, 1265, 1292, 1366, 1406, 3819, 4025), (1040, 1205, 1213, 2003, 2006, 2013)
_NO_USE = re.compile(r"authentication failed|does not exist|no pg_hba\.conf|Access denied|Unknown database")
"""A connection that is refused for these reasons is refused for ever."""
_BUSY = re.compile(r"database (table )?is locked|disk I/O error|unable to open database file")
IDLE = "60s"
"""How long PostgreSQL keeps the transaction of a driver that has stopped in the middle, with its locks."""
LOCKED = "30s"

_metadata = sa.MetaData()
CLAIMS = sa.Table(
    "custody_claims",
    _metadata,
    sa.Column("pipeline", sa.String(40), primary_key=True),
    sa.Column("target", sa.String(200), primary_key=True),
    sa.Column("claim", sa.BigInteger, nullable=False),
)
"""The last claim of each pipeline that was written into a table of this database."""
STAGED = sa.Table(
    "custody_staged",
    _metadata,
    sa.Column("pipeline", sa.String(40), primary_key=True),
    sa.Column("target", sa.String(200), primary_key=True),
    sa.Column("claim", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("token", sa.String(40), primary_key=True),
    sa.Column("part", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("content", sa.LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb"), nullable=False),
)
"""Rows of claims that are not written yet, as Arrow streams."""


_NEW_ROWS = sql.SQL("CREATE TEMP TABLE {new} ON COMMIT DROP AS SELECT {names} FROM {target} WITH NO DATA")
_UPSERT = sql.SQL("INSERT INTO {target} ({names}) SELECT {names} FROM {new} ON CONFLICT ({key}) DO {deed}")


class WrongRows(Exception):
    """The table refuses some of these rows."""


class JdbcTable:
    """One connection to the database of a table."""

    def __init__(self, url: sa.URL, table: str, key: Sequence[str]) -> None:
        self.name, self._key = table, list(key)
        self._schema, _, self._table = table.rpartition(".")
        self._postgres = url.get_backend_name() == "postgresql"
        given: dict[str, dict[str, Any]] = {
            "postgresql": {"connect_timeout": 10},
            "sqlite": {"check_same_thread": False},
        }
        arguments = given.get(url.get_backend_name(), {})
        engine = sa.create_engine(url, poolclass=sa.NullPool, hide_parameters=True, connect_args=arguments)
        with self._explained(connecting=True):
            self._db = engine.connect()

    def close(self) -> None:
        with suppress(SQLAlchemyError):
            self._db.close()

    def prepare(self) -> None:
        """Makes Custody's own tables, if they are missing."""
        for table in (CLAIMS, STAGED):
            if self._has(table):
                continue
            try:
                with self._explained():
                    self._db.execute(CreateTable(table, if_not_exists=True))
                    self._db.commit()
            except (PipelineFailed, WrongRows) as error:
                self.rollback()
                if self._has(table):
                    continue  # another driver has made it at the same time
                statements = [str(CreateTable(one).compile(self._db)).strip() + ";" for one in (CLAIMS, STAGED)]
                raise PipelineFailed(
                    f"the pipeline may not make its table {table.name} beside {self.name}: {error}",
                    "Make both tables, and grant SELECT, INSERT, UPDATE and DELETE on them:\n" + "\n".join(statements),
                ) from error

    def _has(self, table: sa.Table) -> bool:
        return bool(self._inspect(lambda found: found.has_table(table.name)))

    def columns_for(self, names: Sequence[str]) -> list[str]:
        """Which of the columns of the rows go into the table. Refuses a table that cannot take any row."""
        try:
            found = self._inspect(lambda found: found.get_columns(self._table, self._schema or None))
        except sa.exc.NoSuchTableError:
            raise PipelineFailed(f"there is no table {self.name}", "Create it and start the pipeline again.") from None
        self._types = {column["name"]: column["type"] for column in found}
        unknown = [name for name in names if name not in self._types and name not in OWN]
        if unknown:
            raise PipelineFailed(
                f"table {self.name} has no column {unknown[0]!r}; it has: {', '.join(self._types)}",
                "Select the columns of the table in the frame (or in the schema of the sink), or add the column.",
            )
        missing = [key for key in self._key if key not in names]
        needed = [column["name"] for column in found if _needed(column) and column["name"] not in names]
        if missing or needed:
            raise PipelineFailed(
                f"table {self.name} needs the column {[*missing, *needed][0]!r}, and the rows do not have it",
                "Add it to the frame (or to the schema of the sink), or give it a default.",
            )
        return [name for name in names if name in self._types]

    def add(self, write: Write, part: int, content: bytes) -> None:
        """Stages a batch of rows. It is there when `commit` returns."""
        with self._explained():
            self._db.execute(STAGED.insert().values(**self._at(write), token=write.token, part=part, content=content))

    def parts(self, write: Write) -> Iterator[bytes]:
        """The batches that were staged by this write."""
        of_write = sa.and_(self._of(STAGED, write), STAGED.c.claim == write.claim, STAGED.c.token == write.token)
        with self._explained():
            parts = self._db.scalars(sa.select(STAGED.c.part).where(of_write).order_by(STAGED.c.part)).all()
        for part in parts:
            with self._explained():
                content = self._db.scalar(sa.select(STAGED.c.content).where(of_write, STAGED.c.part == part))
            if content is None:
                raise SinkDown(f"the staged rows of claim {write.claim} were removed meanwhile")
            yield bytes(content)

    def remove(self, write: Write) -> None:
        """Removes what was staged for the claim and for earlier ones, by whatever driver."""
        with self._explained():
            self._db.execute(STAGED.delete().where(self._of(STAGED, write), STAGED.c.claim <= write.claim))

    def record(self, write: Write) -> bool:
        """Begins to write a claim: the rows that follow belong to it. False if it was written before."""
        with self._explained():
            if self._postgres:
                self._db.execute(sa.select(sa.func.set_config("idle_in_transaction_session_timeout", IDLE, True)))
                self._db.execute(sa.select(sa.func.set_config("lock_timeout", LOCKED, True)))
                self._db.execute(sa.text("SET CONSTRAINTS ALL IMMEDIATE"))
            later = sa.and_(self._of(CLAIMS, write), CLAIMS.c.claim < write.claim)
            if self._db.execute(CLAIMS.update().where(later).values(claim=write.claim)).rowcount:
                return True
            if self._db.scalar(sa.select(CLAIMS.c.claim).where(self._of(CLAIMS, write))) is not None:
                return False
            try:
                self._db.execute(CLAIMS.insert().values(self._at(write)))
            except sa.exc.IntegrityError as error:
                raise SinkDown("another driver writes a claim of this pipeline") from error
            return True

    def insert(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Inserts rows, all or none. Raises WrongRows if the table refuses some of them."""
        kept = _last_of_each(rows, [columns.index(key) for key in self._key]) if self._key else rows
        with self._explained(), self._db.begin_nested():
            if self._postgres:
                self._copy(columns, [self._texts(columns, row) for row in kept])
            else:
                values = [dict(zip(columns, self._texts(columns, row), strict=True)) for row in kept]
                self._db.execute(self._statement(columns), values)

    def commit(self) -> None:
        with self._explained():
            self._db.commit()

    def rollback(self) -> None:
        with self._explained():
            self._db.rollback()

    def _copy(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        target = sql.Identifier(*filter(None, (self._schema, self._table)))
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        raw: Any = self._db.connection.driver_connection
        with raw.cursor() as cursor:
            if not self._key:
                _copy_rows(cursor, target, names, rows)
                return
            new = sql.Identifier("custody_rows")
            cursor.execute(_NEW_ROWS.format(new=new, names=names, target=target))
            _copy_rows(cursor, new, names, rows)
            key = sql.SQL(", ").join(map(sql.Identifier, self._key))
            others = [sql.Identifier(name) for name in columns if name not in self._key]
            change = sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(name) for name in others)
            deed = sql.SQL("UPDATE SET {}").format(change) if others else sql.SQL("NOTHING")
            cursor.execute(_UPSERT.format(new=new, names=names, target=target, key=key, deed=deed))
            cursor.execute(sql.SQL("DROP TABLE {}").format(new))

    def _statement(self, columns: Sequence[str]) -> sa.Insert:
        table = sa.table(
            self._table, *(sa.column(name, self._types[name]) for name in columns), schema=self._schema or None
        )
        return upsert(self._db.dialect.name, table, self._key) if self._key else sa.insert(table)

    def _texts(self, columns: Sequence[str], row: Sequence[Any]) -> list[Any]:
        """An object is JSON, and so is an array, unless the column is one of arrays."""
        return [
            json.dumps(value, default=str) if isinstance(value, dict | list) and not self._takes(name, value) else value
            for name, value in zip(columns, row, strict=True)
        ]

    def _takes(self, name: str, value: object) -> bool:
        if self._postgres:
            return isinstance(value, list) and isinstance(self._types[name], sa.ARRAY)
        return isinstance(self._types[name], sa.JSON)

    def _at(self, write: Write) -> dict[str, Any]:
        return {"pipeline": write.uid, "target": self.name, "claim": write.claim}

    def _of(self, table: sa.Table, write: Write) -> sa.ColumnElement[bool]:
        return sa.and_(table.c.pipeline == write.uid, table.c.target == self.name)

    def _inspect(self, look: Callable[[sa.Inspector], Any]) -> Any:
        with self._explained(), warnings.catch_warnings():
            warnings.simplefilter("ignore", SAWarning)  # of types that it does not know
            return look(sa.inspect(self._db))

    @contextmanager
    def _explained(self, *, connecting: bool = False) -> Iterator[None]:
        """Says what an error of the database means: wrong rows, a database that is down, or a table of no use."""
        try:
            yield
        except (DBAPIError, psycopg.Error, StatementError, OverflowError) as error:
            if connecting:
                if _NO_USE.search(_said(error)):
                    raise _no_use(self.name, error) from error
                raise SinkDown(_said(error)) from error
            if _passes(error):
                raise SinkDown(_said(error)) from error
            if _is_wrong_data(error):
                raise WrongRows(_said(error)) from error
            raise _no_use(self.name, error) from error


def address_of(url: str) -> sa.URL:
    """The address as SQLAlchemy has it: `postgresql://…`, `sqlite:///…`, also with `jdbc:` before it."""
    found = make_url(url.removeprefix("jdbc:"))
    if found.drivername in _DRIVERS:
        found = found.set(drivername=_DRIVERS[found.drivername])
    query = dict(found.query)  # JDBC has them here
    user, password = query.pop("user", None), query.pop("password", None)
    return sa.URL.create(
        found.drivername, found.username or _one(user), found.password or _one(password), found.host, found.port,
        found.database, query,
    )  # fmt: skip


def upsert(dialect: str, table: sa.TableClause, key: Sequence[str]) -> sa.Insert:
    """Changes the row with the same key, or adds one. PostgreSQL has its own way."""
    others = [column.name for column in table.columns if column.name not in key]
    if dialect in ("mysql", "mariadb"):
        new = mysql.insert(table)
        return new.on_duplicate_key_update({name: new.inserted[name] for name in others or key})
    also = sqlite.insert(table)
    if not others:
        return also.on_conflict_do_nothing(index_elements=key)
    return also.on_conflict_do_update(index_elements=key, set_={name: also.excluded[name] for name in others})


def _copy_rows(cursor: Any, table: sql.Composable, names: sql.Composable, rows: Sequence[Sequence[Any]]) -> None:
    with cursor.copy(sql.SQL("COPY {} ({}) FROM STDIN").format(table, names)) as copy:
        for row in rows:
            copy.write_row(row)


def _one(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else str(value[0])


def _last_of_each(rows: Sequence[Sequence[Any]], key: Sequence[int]) -> Sequence[Sequence[Any]]:
    """The last row of each key: one statement can change a row only once."""
    return list({tuple(row[place] for place in key): row for row in rows}.values())


def _needed(column: Any) -> bool:
    """Whether each row has to have a value for this column."""
    given = column.get("default") is not None or column.get("identity") or column.get("computed")
    numbered = column.get("autoincrement") not in (None, False) or column.get("primary_key")
    return not (column.get("nullable", True) or given or numbered)


def _states(error: BaseException) -> str:
    return str(getattr(getattr(error, "orig", error), "sqlstate", None) or "")[:2]


def _number(error: BaseException) -> object:
    """The number of an error of MySQL."""
    arguments = getattr(getattr(error, "orig", None), "args", ())
    return arguments[0] if arguments else None


def _passes(error: BaseException) -> bool:
    if getattr(error, "connection_invalidated", False) or _states(error) in _PASSES:
        return True
    if isinstance(getattr(error, "orig", error), psycopg.OperationalError) and not _states(error):
        return True  # the connection is gone
    return _number(error) in _PASSES_MYSQL or _BUSY.search(_said(error)) is not None


def _is_wrong_data(error: BaseException) -> bool:
    if _states(error):
        return _states(error) in _WRONG_DATA
    if isinstance(error, sa.exc.IntegrityError | sa.exc.DataError | psycopg.DataError | OverflowError):
        return True
    wrong_value = isinstance(error, StatementError) and not isinstance(error, DBAPIError)
    return wrong_value or _number(error) in _WRONG_MYSQL


def _no_use(table: str, error: BaseException) -> PipelineFailed:
    return PipelineFailed(
        f"table {table} accepts no row: {_said(error)}",
        "Fix the table or the sink and start the pipeline again: nothing was lost, and no failure was counted.",
    )


def _said(error: BaseException) -> str:
    """The database's own message, without the statement."""
    original = getattr(error, "orig", None) or error
    return f"{type(original).__name__}: {original}".strip()[:2000]
