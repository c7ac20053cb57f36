"""Migrations of the schema: tables, their numbered migrations, and functions and views, which each release replaces.

A new database gets its tables from `sql/schema`; an older one gets the same tables by the migrations that it lacks. The
ledger `custody.migrations` records the version of a database, and `custody.release` the release and the digest of its
functions, and the oldest release whose code they serve. Code and schema of neighbouring releases work together; code of
any other version refuses to open the database. During the development of a release only the digest distinguishes states
of the functions, and has to be that of the code.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import LiteralString, NamedTuple, TypeVar, cast

from psycopg import errors, sql

from custody.errors import Busy, SchemaInUse, SchemaMissing, SchemaNewer, SchemaOlder
from custody.store import grants
from custody.store.connecting import BoundedConnection
from custody.store.functions import OLDEST, OUTBOX, RELEASE, SCHEMA, functions, read_script, script_of
from custody.store.postgres import Connection, translated

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOCK_TIMEOUT = "500ms"
"""How long a migration waits for a lock, and whoever comes after it waits too. Then it lets them go on, and tries
again. Less than deadlock_timeout: of a migration and a transaction that wait for each other, the migration gives up."""
PAUSES = (1.0, 2.0, 5.0)
"""Seconds between attempts; the last one is repeated."""
WAIT = 60.0
"""Seconds after which it gives up."""

_THAT_RETURN_ROWS_OF_VIEWS: LiteralString = (
    "SELECT p.oid::regprocedure::text FROM pg_proc p JOIN pg_class c ON c.reltype = p.prorettype "
    "WHERE c.relkind = 'v' AND p.pronamespace"
)
_LOCK = 0x6375_7374  # any number, the same in every version


@dataclass(frozen=True, kw_only=True)
class Migration:
    version: int
    name: str
    script: LiteralString

    def said(self, what: str) -> str:
        """What the comments at its beginning say: `-- locks: …`, `-- takes: …`, `-- before: …`."""
        heading = itertools.takewhile(lambda line: line.startswith("--"), self.script.splitlines())
        found = (line.removeprefix(f"-- {what}:").strip() for line in heading if line.startswith(f"-- {what}:"))
        return next(found, "")


@cache
def migrations() -> tuple[Migration, ...]:
    """The numbered scripts, in order. The first is 2: version 1 is the schema of the first release."""
    files = sorted(entry.name for entry in resources.files("custody.store").joinpath("sql", "migrations").iterdir())
    return tuple(
        Migration(version=int(name[:4]), name=name[5:-4], script=read_script("migrations", name))
        for name in files
        if name.endswith(".sql")
    )


def latest() -> int:
    return max((migration.version for migration in migrations()), default=1)


def outbox_version() -> int:
    """The version that last changed the tables of the outbox."""
    return max((migration.version for migration in migrations() if migration.name.startswith(OUTBOX)), default=1)


class SchemaState(NamedTuple):
    """The state of a database's schema, or of that of this code."""

    version: int
    release: int
    digest: str
    oldest: int = OLDEST

    def __str__(self) -> str:
        return f"schema version {self.version}, release {self.release} (functions {self.digest})"


def wanted() -> SchemaState:
    """The state that this code would make."""
    return SchemaState(latest(), RELEASE, functions()[1])


def state(connection: Connection) -> SchemaState | None:
    """The state of a database, or None if it has no Custody schema."""
    if connection.execute("SELECT to_regclass('custody.migrations')").fetchone() == (None,):
        return None
    row = connection.execute(
        "SELECT (SELECT max(version) FROM custody.migrations), release, digest, oldest FROM custody.release"
    ).fetchone()
    return SchemaState(*cast("tuple[int, int, str, int]", row))


def outbox_state(connection: Connection) -> SchemaState | None:
    """The state of a standalone outbox, or None if there is none."""
    if connection.execute("SELECT to_regclass('custody.outbox_installed')").fetchone() == (None,):
        return None
    row = connection.execute("SELECT version, release, digest, oldest FROM custody.outbox_installed").fetchone()
    return SchemaState(*cast("tuple[int, int, str, int]", row))


def refuse_newer(found: SchemaState) -> None:
    """Refuses a database, or a standalone outbox, of newer code."""
    if found.version > latest() or found.release > RELEASE:
        raise SchemaNewer(
            f"the database is at {found}, this code at {wanted()}", "Upgrade this installation of Custody."
        )


def serves(found: SchemaState) -> bool:
    """Whether the schema is of a newer release, and works with this code."""
    return found.oldest <= RELEASE < found.release


def fits(found: SchemaState) -> bool:
    """Whether the schema is of another release, and works with this code."""
    return serves(found) or OLDEST <= found.release < RELEASE


def check(connection: Connection) -> int:
    """Refuses a database whose schema does not work with this code. Returns the release of the schema."""
    found = state(connection)
    remedy = "Run `custody migrate` once."
    if found is None:
        raise SchemaMissing("the database has no Custody schema", remedy)
    if not fits(found) and found != wanted():
        refuse_newer(found)
        raise SchemaOlder(f"the database is at {found}, this code at {wanted()}", remedy)
    return found.release


def lock(connection: Connection) -> None:
    """Locks the schema against other migrations until the transaction ends, without a statement timeout. No later
    statement of the transaction waits long for a lock."""
    connection.execute("SET LOCAL statement_timeout = 0")  # a default of the database may be too short for waiting
    connection.execute("SET LOCAL lock_timeout = 0")
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(LOCK_TIMEOUT))


def migrate(url: str, *, wait: float = WAIT) -> list[int]:
    """Migrates a database to the schema of this code; does nothing if it has that. Several may run it at once.

    Returns the applied versions. All of it is one transaction, which waits for the calls that run, and those that come
    later wait for it. If it does not get its locks at once it lets the others go on and tries again, for `wait` seconds
    (`Busy`). Refuses a newer database, and one in which a user's objects depend on views or functions that have to be
    replaced.
    """
    return attempted(url, _migrate, wait)


def attempted(url: str, change: Callable[[Connection], T], wait: float) -> T:
    """Makes a change in a transaction of its own, again and again while others hold the locks that it needs."""
    until = time.monotonic() + wait
    for pause in itertools.chain(PAUSES, itertools.repeat(PAUSES[-1])):
        with translated(), BoundedConnection.connect(url, application_name="custody migrate") as connection:
            try:
                with connection.transaction():
                    lock(connection)
                    return change(connection)
            except errors.LockNotAvailable as error:
                held = holders(connection)
                if time.monotonic() + pause > until:
                    raise Busy(
                        f"the migration waited {wait:.0f} s for locks, and changed nothing; they are held by {held}",
                        "End these transactions, or wait longer: `custody migrate --wait 10m`.",
                    ) from error
                logger.warning("the migration waits for locks that are held by %s", held)
        time.sleep(pause)
    raise AssertionError("the last pause is repeated")


def holders(connection: Connection) -> str:
    """The oldest transactions that hold locks on tables or views of the schema."""
    rows = connection.execute(read_script("holders.sql")).fetchall()
    return ", ".join(f"pid {pid} ({who}, since {since:%H:%M:%S}, {state})" for pid, who, since, state in rows) or "none"


def _migrate(connection: Connection) -> list[int]:
    connection.execute("SET LOCAL check_function_bodies = off")
    found = state(connection)
    outbox = outbox_state(connection) if found is None else None
    refuse_newer(found or outbox or SchemaState(0, 0, ""))
    if found == wanted():
        return []
    connection.execute("CREATE SCHEMA IF NOT EXISTS custody")
    if found is not None:
        connection.execute("LOCK TABLE custody.release")  # see base/guard.sql
    drop_functions(connection)
    if found is None:
        make_outbox(connection, outbox)
        connection.execute(script_of(*(f"schema/{name}" for name in SCHEMA)))
        applied = [(latest(), "schema")]
    else:
        applied = _run([migration for migration in migrations() if migration.version > found.version], connection)
    for version, name in applied:
        connection.execute("INSERT INTO custody.migrations (version, name) VALUES (%s, %s)", [version, name])
    script, digest = functions()
    connection.execute(script)
    grants.give_again(connection)
    connection.execute("DELETE FROM custody.release")
    connection.execute(
        "INSERT INTO custody.release (release, digest, oldest) VALUES (%s, %s, %s)", [RELEASE, digest, OLDEST]
    )
    return [version for version, _ in applied]


def make_outbox(connection: Connection, found: SchemaState | None) -> None:
    """Creates the tables of the outbox, or migrates those of a standalone outbox."""
    if found is None:
        connection.execute(script_of(f"schema/{OUTBOX}"))
    else:
        _run([one for one in migrations() if one.name.startswith(OUTBOX) and one.version > found.version], connection)


def _run(pending: list[Migration], connection: Connection) -> list[tuple[int, str]]:
    for migration in pending:
        connection.execute(migration.script)
    return [(migration.version, migration.name) for migration in pending]


def refuse_dependents(connection: Connection) -> None:
    """Refuses a database in which objects of a user depend on what is replaced."""
    dependents = [name for (name,) in connection.execute(read_script("dependents.sql")).fetchall()]
    if dependents:
        raise SchemaInUse(
            f"objects of yours depend on views or functions that have to be replaced: {', '.join(dependents)}",
            "Drop them, migrate, and create them again. Nothing was changed.",
        )


def drop_functions(connection: Connection) -> None:
    """Drops every view, routine and composite type of the schema: they hold no data, and are created again.

    Objects of a user that depend on them would be lost, so that is refused; nothing is dropped with CASCADE.
    """
    refuse_dependents(connection)
    # triggers of our tables that call our functions are created again with them; those of a user stay
    for name, table in connection.execute(
        "SELECT tgname, tgrelid::regclass::text FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid "
        "JOIN pg_proc f ON f.oid = t.tgfoid WHERE c.relnamespace = 'custody'::regnamespace AND c.relkind = 'r' "
        "AND f.pronamespace = 'custody'::regnamespace AND NOT t.tgisinternal"
    ).fetchall():
        connection.execute(sql.SQL("DROP TRIGGER {} ON {}").format(sql.Identifier(name), sql.SQL(table)))
    for kind, names in (
        ("ROUTINE", _THAT_RETURN_ROWS_OF_VIEWS),
        ("VIEW", "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'v' AND relnamespace"),
        ("ROUTINE", "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace"),
        ("TYPE", "SELECT reltype::regtype::text FROM pg_class WHERE relkind = 'c' AND relnamespace"),
    ):
        rows = connection.execute(sql.SQL("{} = 'custody'::regnamespace").format(sql.SQL(names))).fetchall()
        if rows:
            # all of a kind at once, because they may depend on each other
            every = sql.SQL(", ").join(sql.SQL(name) for (name,) in rows)
            connection.execute(sql.SQL("DROP {} {}").format(sql.SQL(kind), every))
