"""Creates and drops databases of a server, for tests."""

from __future__ import annotations

from urllib.parse import quote

from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from custody.store.connecting import BoundedConnection
from custody.store.postgres import translated


def sibling(url: str, database: str) -> str:
    """The URL of another database of the same server."""
    parts = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    parts["dbname"] = database
    return "postgresql:///?" + "&".join(f"{name}={quote(value, safe='')}" for name, value in parts.items())


def create(url: str, database: str, *, template: str | None = None) -> str:
    """Creates a database, as a copy of the template if one is given. Returns its URL."""
    statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(database))
    if template is not None:
        # copying files is faster than copying through the write-ahead log, and the copy need not be durable
        copy = sql.SQL("{} TEMPLATE {} STRATEGY FILE_COPY")
        statement = copy.format(statement, sql.Identifier(template))
    _execute(url, statement)
    return sibling(url, database)


def drop(url: str, database: str) -> None:
    """Drops a database, and ends its connections."""
    _execute(url, sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database)))


def _execute(url: str, statement: sql.Composed) -> None:
    with translated(), BoundedConnection.connect(url, autocommit=True) as connection:
        connection.execute(statement)
