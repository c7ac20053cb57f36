"""Installs the outbox alone, in a database without the rest of Custody: the same tables and functions, its own
ledger."""

from __future__ import annotations

from functools import cache
from typing import LiteralString

from custody.errors import SchemaMissing, SchemaOlder
from custody.store import migrate
from custody.store.functions import OLDEST, RELEASE, guarded, script_of
from custody.store.postgres import Connection

FUNCTIONS = ("base/refuse", "outbox/outbox_alone", "outbox/outbox", "outbox/outbox_claim", "outbox/outbox_operate")


@cache
def functions() -> tuple[LiteralString, str]:
    """The functions and views of the outbox as one script, and its digest."""
    return guarded(script_of(*FUNCTIONS))


def wanted(release: int = RELEASE, oldest: int = OLDEST) -> migrate.SchemaState:
    """The state that this code would make. The release does not matter, because most releases do not change the
    outbox."""
    return migrate.SchemaState(migrate.outbox_version(), release, functions()[1], oldest)


def install(url: str) -> bool:
    """Installs the outbox, or migrates it to this version. Several may run it at once. True if anything changed.

    A database with all of Custody includes the outbox, and is migrated as a whole. Refuses an outbox of newer code.
    """
    changed = migrate.attempted(url, _install, migrate.WAIT)
    return bool(migrate.migrate(url)) if changed is None else changed


def _install(connection: Connection) -> bool | None:
    """None if the database has all of Custody."""
    if migrate.state(connection) is not None:
        return None
    script, _ = functions()
    found = migrate.outbox_state(connection)
    if found is not None:
        if found == wanted(found.release, found.oldest):
            return False
        migrate.refuse_newer(found)
    connection.execute("SET LOCAL check_function_bodies = off")
    connection.execute("CREATE SCHEMA IF NOT EXISTS custody")
    if found is not None:
        connection.execute("LOCK TABLE custody.outbox_installed")  # see base/guard.sql
    migrate.drop_functions(connection)
    migrate.make_outbox(connection, found)
    connection.execute(script)
    if found is None:
        connection.execute(script_of("schema/outbox_installed"))
    connection.execute("DELETE FROM custody.outbox_installed")
    connection.execute(
        "INSERT INTO custody.outbox_installed (version, release, digest, oldest) VALUES (%s, %s, %s, %s)", wanted()
    )
    return True


def check(connection: Connection) -> tuple[bool, int]:
    """Refuses a database whose outbox does not work with this code. Whether it has all of Custody, and its release."""
    if migrate.state(connection) is not None:
        return True, migrate.check(connection)
    remedy = "Run `custody outbox install` once."
    found = migrate.outbox_state(connection)
    if found is None:
        raise SchemaMissing("the database has no outbox", remedy)
    if found == wanted(found.release, found.oldest):
        return False, RELEASE
    if not migrate.fits(found):
        migrate.refuse_newer(found)
        raise SchemaOlder(f"the outbox of the database is at {found}, this code at {wanted()}", remedy)
    return False, found.release
