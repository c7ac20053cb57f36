"""Installs the outbox alone, in a database without the rest of Custody: the same tables and functions, its own
ledger."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import LiteralString

from custody.errors import SchemaMissing, SchemaOlder
from custody.store import migrate
from custody.store.connecting import BoundedConnection
from custody.store.functions import script_of
from custody.store.postgres import Connection, translated

FUNCTIONS = ("base/refuse", "outbox/outbox_alone", "outbox/outbox", "outbox/outbox_claim", "outbox/outbox_operate")


@cache
def functions() -> tuple[LiteralString, str]:
    """The functions and views of the outbox as one script, and its digest."""
    script = script_of(*FUNCTIONS)
    return script, hashlib.sha256(script.encode()).hexdigest()[:16]


def wanted(release: int = migrate.RELEASE) -> migrate.SchemaState:
    """The state that this code needs. The release does not matter, because most releases do not change the outbox."""
    return migrate.SchemaState(migrate.outbox_version(), release, functions()[1])


def install(url: str) -> bool:
    """Installs the outbox, or migrates it to this version. Several may run it at once. True if anything changed.

    A database with all of Custody includes the outbox, and is migrated as a whole. Refuses an outbox of newer code.
    """
    with translated(), BoundedConnection.connect(url) as connection:
        migrate.lock(connection)
        if migrate.state(connection) is not None:
            full = True
        else:
            script, _ = functions()
            found = migrate.outbox_state(connection)
            if found is not None:
                if found == wanted(found.release):
                    return False
                migrate.refuse_newer(found)
            connection.execute("SET LOCAL check_function_bodies = off")
            connection.execute("CREATE SCHEMA IF NOT EXISTS custody")
            migrate.drop_functions(connection)
            migrate.make_outbox(connection, found)
            connection.execute(script)
            if found is None:
                connection.execute(script_of("schema/outbox_installed"))
            connection.execute("DELETE FROM custody.outbox_installed")
            connection.execute(
                "INSERT INTO custody.outbox_installed (version, release, digest) VALUES (%s, %s, %s)",
                wanted(),
            )
            return True
    return full and bool(migrate.migrate(url))


def check(connection: Connection) -> bool:
    """Refuses a database whose outbox is not that of this code. True if it has all of Custody."""
    if migrate.state(connection) is not None:
        migrate.check(connection)
        return True
    remedy = "Run `custody outbox install` once, while no older version of Custody is running."
    found = migrate.outbox_state(connection)
    if found is None:
        raise SchemaMissing("the database has no outbox", remedy)
    if found != wanted(found.release):
        migrate.refuse_newer(found)
        raise SchemaOlder(f"the outbox of the database is at {found}, this code at {wanted()}", remedy)
    return False
