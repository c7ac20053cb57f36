"""The schema's versions: numbered migrations for tables, and functions and views applied anew with each release.

The ledger `custody.migrations` says which migrations a database has had, and `custody.release` the digest of the
functions that it has. Whoever opens a database with other code gets a clear error instead of a strange one later.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import LiteralString, cast

import psycopg
from psycopg import sql

from custody.errors import SchemaMissing, SchemaNewer, SchemaOlder
from custody.store.postgres import Connection, translated

# In this order: a type or a view needs what it is made of.
FUNCTIONS = (
    "guards", "ranges", "topics", "read", "stats", "publish", "producers", "groups", "bare", "failures", "breaker",
    "expire", "order", "take", "claim", "leased", "settle_parts", "settle", "redrive", "rewind", "blocked",
    "retention", "views",
    "doctor",
)  # fmt: skip
_LOCK = 0x6375_7374  # any number, the same in every version


@dataclass(frozen=True, kw_only=True)
class Migration:
    version: int
    name: str
    script: LiteralString


def _script(*path: str) -> LiteralString:
    # a file of our own package is as good as a literal
    return resources.files("custody.store").joinpath("sql", *path).read_text(encoding="utf-8")


@cache
def migrations() -> tuple[Migration, ...]:
    """The numbered scripts, in order."""
    files = sorted(entry.name for entry in resources.files("custody.store").joinpath("sql", "migrations").iterdir())
    return tuple(
        Migration(version=int(name[:4]), name=name[5:-4], script=_script("migrations", name))
        for name in files
        if name.endswith(".sql")
    )


@cache
def functions() -> tuple[LiteralString, str]:
    """All functions and views as one script, and its digest."""
    script = "\n".join(_script(f"{name}.sql") for name in FUNCTIONS)
    return script, hashlib.sha256(script.encode()).hexdigest()[:16]


def latest() -> int:
    return migrations()[-1].version


def state(connection: Connection) -> tuple[int, str] | None:
    """The version and the digest that a database is at, or None if it has no Custody schema."""
    if connection.execute("SELECT to_regclass('custody.migrations')").fetchone() == (None,):
        return None
    row = connection.execute(
        "SELECT (SELECT max(version) FROM custody.migrations), (SELECT digest FROM custody.release)"
    ).fetchone()
    return cast("tuple[int, str]", row)


def check(connection: Connection) -> None:
    """Refuses a database whose schema is not the one of this code."""
    found = state(connection)
    remedy = "Run `custody migrate` once, with no older version of Custody still at work."
    if found is None:
        raise SchemaMissing("the database has no Custody schema", remedy)
    version, digest = found
    if version > latest():
        raise SchemaNewer(
            f"the database is at schema version {version}, this code at {latest()}",
            "Upgrade this installation of Custody.",
        )
    if version < latest() or digest != functions()[1]:
        raise SchemaOlder(
            f"the database is at schema version {version} (functions {digest}), "
            f"this code at {latest()} ({functions()[1]})",
            remedy,
        )


def migrate(url: str) -> list[int]:
    """Brings a database to this code's schema; does nothing if it is there. Safe to run by several at once.

    Returns the versions that were applied. All of it is one transaction: it happens whole or not at all.
    """
    with translated(), psycopg.connect(url) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        connection.execute("SET LOCAL check_function_bodies = off")
        found = state(connection)
        if found is None:
            connection.execute("CREATE SCHEMA IF NOT EXISTS custody")
            connection.execute(
                "CREATE TABLE custody.migrations "
                "(version int PRIMARY KEY, name text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
            )
            connection.execute(
                "CREATE TABLE custody.release (digest text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())"
            )
            found = (0, "")
        version, digest = found
        if version > latest():
            raise SchemaNewer(
                f"the database is at schema version {version}, this code at {latest()}",
                "Upgrade this installation of Custody.",
            )
        pending = [migration for migration in migrations() if migration.version > version]
        script, wanted = functions()
        if not pending and digest == wanted:
            return []
        _drop_functions(connection)
        for migration in pending:
            connection.execute(migration.script)
            connection.execute(
                "INSERT INTO custody.migrations (version, name) VALUES (%s, %s)", [migration.version, migration.name]
            )
        connection.execute(script)
        connection.execute("DELETE FROM custody.release")
        connection.execute("INSERT INTO custody.release (digest) VALUES (%s)", [wanted])
        return [migration.version for migration in pending]


def _drop_functions(connection: Connection) -> None:
    """Removes every view, function and composite type of the schema: they hold nothing, and all come back."""
    for (view,) in connection.execute("SELECT viewname FROM pg_views WHERE schemaname = 'custody'").fetchall():
        connection.execute(sql.SQL("DROP VIEW IF EXISTS {} CASCADE").format(sql.Identifier("custody", view)))
    for (signature,) in connection.execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = 'custody'::regnamespace"
    ).fetchall():
        connection.execute(
            sql.SQL("DROP ROUTINE IF EXISTS {} CASCADE").format(sql.SQL(cast("LiteralString", signature)))
        )
    for (name,) in connection.execute(
        "SELECT t.typname FROM pg_type t JOIN pg_class c ON c.oid = t.typrelid "
        "WHERE t.typnamespace = 'custody'::regnamespace AND c.relkind = 'c'"
    ).fetchall():
        connection.execute(sql.SQL("DROP TYPE IF EXISTS {} CASCADE").format(sql.Identifier("custody", name)))
