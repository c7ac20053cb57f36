"""The outbox alone, in a database that has nothing else of Custody: the same table and functions, its own ledger."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import LiteralString

from custody.errors import SchemaMissing, SchemaOlder
from custody.store import migrate
from custody.store.connecting import BoundedConnection
from custody.store.postgres import Connection, translated

FUNCTIONS = ("base/refuse", "outbox/outbox_alone", "outbox/outbox", "outbox/outbox_claim", "outbox/outbox_operate")
# by name: the numbered scripts that concern the outbox
MIGRATIONS = ("outbox", "outbox_indexes", "outbox_key_length", "outbox_first_due")


@cache
def _scripts() -> tuple[tuple[LiteralString, ...], str]:
    tables = tuple(one.script for one in migrate.migrations() if one.name in MIGRATIONS)
    scripts = (*tables, migrate.script_of(*FUNCTIONS))
    return scripts, hashlib.sha256("\n".join(scripts).encode()).hexdigest()[:16]


def install(url: str) -> bool:
    """Makes the outbox, or brings it to this version; nothing if it is there. Safe to run by several at once.

    A database that has all of Custody has the outbox with it, and is migrated as a whole. True if anything changed.
    Refuses an outbox of newer code.
    """
    with translated(), BoundedConnection.connect(url) as connection:
        migrate.lock(connection)
        if migrate.state(connection) is not None:
            full = True
        else:
            scripts, digest = _scripts()
            found = migrate.outbox_state(connection)
            if found is not None:
                if found.digest == digest:
                    return False
                migrate.refuse_newer(found)
            connection.execute("SET LOCAL check_function_bodies = off")
            connection.execute("CREATE SCHEMA IF NOT EXISTS custody")
            migrate.drop_functions(connection)
            for script in scripts:
                connection.execute(script)
            connection.execute(
                "CREATE TABLE IF NOT EXISTS custody.outbox_installed "
                "(digest text NOT NULL, at timestamptz NOT NULL DEFAULT now())"
            )
            connection.execute(
                "ALTER TABLE custody.outbox_installed ADD COLUMN IF NOT EXISTS version int, "
                "ADD COLUMN IF NOT EXISTS release int"
            )
            connection.execute("DELETE FROM custody.outbox_installed")
            connection.execute(
                "INSERT INTO custody.outbox_installed (version, release, digest) VALUES (%s, %s, %s)",
                [migrate.latest(), migrate.RELEASE, digest],
            )
            return True
    return full and bool(migrate.migrate(url))


def check(connection: Connection) -> bool:
    """Refuses a database whose outbox is not the one of this code. True if it has all of Custody."""
    if migrate.state(connection) is not None:
        migrate.check(connection)
        return True
    remedy = "Run `custody outbox install` once, with no older version of Custody still at work."
    found = migrate.outbox_state(connection)
    if found is None:
        raise SchemaMissing("the database has no outbox", remedy)
    if found.digest != _scripts()[1]:
        migrate.refuse_newer(found)
        raise SchemaOlder(f"the outbox in the database is {found.digest}, this code's {_scripts()[1]}", remedy)
    return False
