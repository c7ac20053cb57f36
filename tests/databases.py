"""Databases for tests: one is kept for the tests of a process and emptied after each of them; the others are copies.

A copy for each test costs more than most tests do: it is made and dropped, and its connections know none of the
functions yet. So the kept one is emptied, and keeps its pool of connections. Then it is compared with the template.
Whatever cannot be put back is gone with it, and the next test gets a copy under another name: a change of the schema or
of a setting, statistics, and connections and locks that have outlived their test.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

import custody
from custody.store.postgres import Database

_numbers = itertools.count()

ENDING = 0.5
"""Seconds that the backend of a closed connection has to end."""
HOLDERS = ("custody.store.adbc", "custody.store.staging")
"""Modules that keep connections for as long as their process lives."""
WORN = 200
"""Tests for which one copy is kept: where another table refers to a table, its deleted rows stay in the file."""

# Whoever changed one of their rows has left a new version of it.
CATALOGS = {
    "pg_attrdef": "oid",
    "pg_attribute": "attrelid",
    "pg_constraint": "oid",
    "pg_default_acl": "oid",
    "pg_event_trigger": "oid",
    "pg_extension": "oid",
    "pg_index": "indexrelid",
    "pg_namespace": "oid",
    "pg_policy": "oid",
    "pg_proc": "oid",
    "pg_rewrite": "oid",
    "pg_sequence": "seqrelid",
    "pg_statistic": "starelid",
    "pg_trigger": "oid",
    "pg_type": "oid",
}
FIRST = {"pg_namespace": 100}
"""Of most catalogs, rows that belong to this database alone are compared; the schema `public` is, too."""
VERSIONS = "(SELECT sum(hashint4extended(age(t.xmin) - age('3'::xid), hashtid(t.ctid))) FROM {} t WHERE {} >= {})"
"""`age` counts back from now, so a difference of two stays the same. It has none for what initdb made first."""
RELATIONS = """
    (SELECT sum(hashtextextended(concat_ws(' ', c.oid, c.relname, c.relnamespace, c.relkind, c.relowner, c.relacl,
        c.reloptions, c.relhastriggers, c.relrowsecurity, c.relispartition, c.relpersistence,
        CASE WHEN c.relkind <> 'i' THEN c.reltuples END), 0))
     FROM pg_class c WHERE c.oid >= 16384)"""
SETTINGS = """
    (SELECT concat(d.datacl, (SELECT array_agg(s.setconfig) FROM pg_db_role_setting s WHERE s.setdatabase = d.oid))
     FROM pg_database d WHERE d.datname = current_database())"""
OTHERS = """
    SELECT count(*) FROM pg_stat_activity
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
      AND (pid <> ALL (%(pool)s) OR state <> 'idle' OR pid IN (SELECT pid FROM pg_locks))"""
GROWN = """
    SELECT ARRAY(SELECT relname::text FROM pg_class
                 WHERE relnamespace = 'custody'::regnamespace AND relname ~ '^(log|staged)_' AND relkind = 'r'),
           ARRAY(SELECT oid::regprocedure::text FROM pg_proc
                 WHERE pronamespace = 'custody'::regnamespace AND proname ~ '_[0-9]+$'),
           ARRAY(SELECT n FROM unnest({}::text[]) n WHERE pg_relation_size(('custody.' || n)::regclass) > 80 * 1024)"""
"""Segments of the log and stages, functions of open segments, and tables with many rows that no other refers to."""


@contextmanager
def in_memory(prefix: str) -> Iterator[Path]:
    """A new directory on a file system without a disk, if there is one with room: a server is made faster there."""
    memory = Path("/dev/shm")
    room = memory.is_dir() and shutil.disk_usage(memory).free > 8 * 2**30
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=memory if room else None))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def url_of(server_url: str, database: str) -> str:
    """The same server, another database."""
    parts = conninfo_to_dict(server_url)
    host, port = parts.get("host") or "", parts.get("port")
    login = str(parts.get("user") or "postgres")
    if parts.get("password"):
        login += f":{parts['password']}"
    if str(host).startswith("/"):
        return f"postgresql://{login}@/{database}?host={host}" + (f"&port={port}" if port else "")
    return f"postgresql://{login}@{host}:{port or 5432}/{database}"


def table(name: str) -> sql.Identifier:
    return sql.Identifier("custody", name)


class Copy:
    """A copy of a template, or an empty database. It is dropped at the end, whoever is connected to it."""

    def __init__(self, server_url: str, template: str = "template1") -> None:
        self._server_url, self.name = server_url, f"custody_kept_{os.getpid()}_{next(_numbers)}"
        self._execute("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY", self.name, template)
        self.url = url_of(server_url, self.name)

    def _execute(self, statement: str, *names: str) -> None:
        with psycopg.connect(self._server_url, autocommit=True) as server:
            server.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))

    def custody(self, *, worker: str, clock: Callable[[], datetime] | None = None) -> custody.Custody:
        return custody.connect(self.url, worker=worker, clock=clock)

    def close(self) -> None:
        self._execute("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name)


class Pool(Database):
    """Connections that stay open when a test closes its Custody."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()

    def backends(self) -> list[int]:
        """The processes of those connections at the server that nobody uses."""
        return [connection.info.backend_pid for connection in list(self._pool._pool)]


class Schema:
    """What the template looks like, and how a copy of it is emptied.

    Rows are deleted: to truncate a table takes longer, and all connections then have to plan its statements again. Only
    what has grown is truncated.
    """

    def __init__(self, template_url: str) -> None:
        with psycopg.connect(template_url, autocommit=True) as connection:
            tables = connection.execute(
                "SELECT c.relname, EXISTS (SELECT FROM pg_constraint r WHERE r.confrelid = c.oid) "
                "FROM pg_class c WHERE c.relnamespace = 'custody'::regnamespace AND c.relkind = 'r'"
            ).fetchall()
            # some have rows from the beginning: the versions of the schema, settings
            has_rows = sql.SQL("SELECT EXISTS (SELECT FROM {})")
            filled = [
                name for name, _ in tables if connection.execute(has_rows.format(table(name))).fetchone() == (True,)
            ]
            names = [name for name, _ in tables if name not in filled]
            sequences = connection.execute(
                "SELECT sequencename, coalesce(last_value, start_value), last_value IS NOT NULL "
                "FROM pg_sequences WHERE schemaname = 'custody'"
            ).fetchall()
            state = self._state_query(filled, names, [name for name, *_ in sequences])
            grown = sql.SQL(GROWN).format([name for name, referenced in tables if not referenced and name in names])
            deletes = [sql.SQL("{} AS (DELETE FROM {})").format(sql.Identifier(name), table(name)) for name in names]
            rewinds = [
                sql.SQL("setval({}, {}, {})").format(f"custody.{name}", value, called)
                for name, value, called in sequences
            ]
            delete = sql.SQL("WITH {} SELECT {}").format(sql.SQL(", ").join(deletes), sql.SQL(", ").join(rewinds))
            self._grown, self._delete, self._state = (query.as_bytes(connection) for query in (grown, delete, state))
            self.fresh = self.state(connection)

    @staticmethod
    def _state_query(filled: list[str], names: list[str], sequences: list[str]) -> sql.Composed:
        catalogs = [
            sql.SQL(VERSIONS).format(sql.Identifier(name), sql.Identifier(oid), FIRST.get(name, 16384))
            for name, oid in CATALOGS.items()
        ]
        rows = [sql.SQL(VERSIONS).format(table(name), 1, 1) for name in filled]
        empty = [sql.SQL("EXISTS (SELECT FROM {})").format(table(name)) for name in names]
        places = [sql.SQL("(SELECT concat(last_value, is_called) FROM {})").format(table(name)) for name in sequences]
        return sql.SQL("SELECT {}").format(
            sql.SQL(", ").join([*catalogs, *rows, *empty, *places, sql.SQL(RELATIONS), sql.SQL(SETTINGS)])
        )

    def state(self, connection: psycopg.Connection[Any]) -> Any:
        return connection.execute(self._state, prepare=True).fetchone()

    def empty(self, connection: psycopg.Connection[Any]) -> None:
        row = connection.execute(self._grown, prepare=True).fetchone()
        assert row is not None
        tables, functions, grown = row
        statements = [sql.SQL("DROP TABLE {}").format(table(name)) for name in tables]
        if functions:
            statements.append(sql.SQL("DROP FUNCTION {}").format(sql.SQL(", ").join(map(sql.SQL, functions))))
        if grown:
            statements.append(sql.SQL("TRUNCATE {}").format(sql.SQL(", ").join(map(table, grown))))
        if statements:
            # in a block: after a DROP psycopg drops what its session has prepared
            block = sql.SQL("; ").join(statements).as_string(connection)
            connection.execute(sql.SQL("DO {}").format(sql.Literal(f"BEGIN {block}; END")))
        connection.execute(self._delete, prepare=True)


class Kept:
    """The database that tests have one after the other."""

    def __init__(self, server_url: str, template: str) -> None:
        self._server_url, self._template = server_url, template
        self._schema = Schema(url_of(server_url, template))
        self._open()

    def _open(self) -> None:
        self._tests, self._pool = 0, None
        with ExitStack() as things:
            copy = Copy(self._server_url, self._template)
            things.callback(copy.close)
            self.url = copy.url
            self._own = things.enter_context(psycopg.connect(self.url, autocommit=True))
            # no triggers, so that rows go in any order; and no waiting for a transaction that was left open
            self._own.execute("SET session_replication_role = replica")
            self._own.execute("SET lock_timeout = '500ms'")
            self._things = things.pop_all()

    def custody(self, *, worker: str, clock: Callable[[], datetime] | None = None) -> custody.Custody:
        """Custody on the connections that are kept."""
        if self._pool is None:
            self._pool = Pool(self.url)
            self._things.callback(self._pool.end)
        return custody.Custody(self._pool, worker=worker, clock=clock)

    def recycle(self) -> None:
        """After each test: as new, or another one."""
        self._tests += 1
        try:
            clean = self._tests < WORN and self._left() and self._emptied()
        except psycopg.Error:
            clean = False  # a lock, another schema, or the test has ended all connections
        if not clean:
            self._things.close()
            self._open()

    def _left(self) -> bool:
        """Whether the test, and everything it started, has let go of it."""
        for holder in HOLDERS:
            if holder in sys.modules:
                sys.modules[holder].close_all()
        until = time.monotonic() + ENDING
        while True:
            pool = [] if self._pool is None else self._pool.backends()
            (others,) = self._own.execute(OTHERS, {"pool": pool}, prepare=True).fetchone() or (1,)
            if not others or time.monotonic() > until:
                return not others
            time.sleep(0.002)

    def _emptied(self) -> bool:
        self._schema.empty(self._own)
        return bool(self._schema.state(self._own) == self._schema.fresh)

    def close(self) -> None:
        self._things.close()
