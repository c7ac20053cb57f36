"""The schema's versions: tables, numbered migrations of them, and functions and views applied anew with each release.

A new database gets its tables from `sql/schema`; an older one comes to the same by the migrations that it lacks. The
ledger `custody.migrations` says which version a database has, and `custody.release` the release and the digest of its
functions. Whoever opens a database with other code gets a clear error instead of a strange
one later. Within one release, while it is developed, the digest alone tells one state of the functions from another.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import LiteralString, NamedTuple, cast

from psycopg import sql

from custody.errors import SchemaInUse, SchemaMissing, SchemaNewer, SchemaOlder
from custody.store.connecting import BoundedConnection
from custody.store.postgres import Connection, translated

RELEASE = 1  # raised by each release that changes a file of FUNCTIONS: so older code knows that it is older

# In this order: a table refers to earlier ones.
SCHEMA = ("ledger", "log", "producers", "groups", "leases", "journal", "pipelines", "api_keys")
OUTBOX = "outbox"
"""The part of the schema, and the beginning of the names of migrations, that an outbox alone has, too."""

# In this order: a type or a view needs what it is made of.
FUNCTIONS = (
    "base/refuse", "base/guards", "base/ranges",
    "log/topics", "log/priorities", "log/read", "log/bulk_reads",
    "insights/stats",
    "log/delays", "log/publish", "log/producers",
    "lifecycle/groups", "lifecycle/bare", "lifecycle/failures", "lifecycle/dead_letter", "lifecycle/breaker",
    "claim/expire", "claim/order", "claim/take", "claim/fairness", "claim/routing", "claim/turns",
    "claim/claim_partition", "claim/claim", "claim/leased",
    "lifecycle/lease_record", "lifecycle/settle_steps", "lifecycle/settle", "lifecycle/redrive", "lifecycle/replay",
    "lifecycle/rewind", "lifecycle/blocked",
    "pipelines/stage", "pipelines/pipelines", "pipelines/commit", "pipelines/pipeline_writes",
    "log/transactions",
    "upkeep/segments", "upkeep/drop_unresolved", "upkeep/upkeep", "upkeep/journal",
    "log/growth",
    "insights/views", "insights/doctor",
    "outbox/outbox", "outbox/outbox_claim", "outbox/outbox_operate", "outbox/outbox_topics",
    "server/coalesced", "server/apikeys",
    "insights/figures",
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
    """The numbered scripts, in order. The first is 2: version 1 is the schema of the first release."""
    files = sorted(entry.name for entry in resources.files("custody.store").joinpath("sql", "migrations").iterdir())
    return tuple(
        Migration(version=int(name[:4]), name=name[5:-4], script=_script("migrations", name))
        for name in files
        if name.endswith(".sql")
    )


def script_of(*names: str) -> LiteralString:
    """Files of functions and views as one script."""
    return "\n".join(_script(f"{name}.sql") for name in names)


@cache
def functions() -> tuple[LiteralString, str]:
    """All functions and views as one script, and its digest."""
    script = script_of(*FUNCTIONS)
    return script, hashlib.sha256(script.encode()).hexdigest()[:16]


_FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION custody\.(\w+)\((.*?)\)\s+(?:RETURNS|LANGUAGE)", re.DOTALL)


@cache
def _parameters() -> dict[str, tuple[str, ...]]:
    return {name: tuple(re.findall(r"\bp_(\w+)", given)) for name, given in _FUNCTION.findall(functions()[0])}


def parameters_of(function: str) -> tuple[str, ...]:
    """What a SQL function of ours takes, by name."""
    return _parameters()[function]


def latest() -> int:
    return max((migration.version for migration in migrations()), default=1)


def outbox_version() -> int:
    """The version that last changed the tables of the outbox."""
    return max((migration.version for migration in migrations() if migration.name.startswith(OUTBOX)), default=1)


class SchemaState(NamedTuple):
    """What a database has, or what this code brings."""

    version: int
    release: int
    digest: str

    def __str__(self) -> str:
        return f"schema version {self.version}, release {self.release} (functions {self.digest})"


def wanted() -> SchemaState:
    """The state that this code needs."""
    return SchemaState(latest(), RELEASE, functions()[1])


def state(connection: Connection) -> SchemaState | None:
    """The state of a database, or None if it has no Custody schema."""
    if connection.execute("SELECT to_regclass('custody.migrations')").fetchone() == (None,):
        return None
    row = connection.execute(
        "SELECT (SELECT max(version) FROM custody.migrations), release, digest FROM custody.release"
    ).fetchone()
    return SchemaState(*cast("tuple[int, int, str]", row))


def outbox_state(connection: Connection) -> SchemaState | None:
    """The state of an outbox that was installed alone, or None if there is none."""
    if connection.execute("SELECT to_regclass('custody.outbox_installed')").fetchone() == (None,):
        return None
    row = connection.execute("SELECT version, release, digest FROM custody.outbox_installed").fetchone()
    return SchemaState(*cast("tuple[int, int, str]", row))


def refuse_newer(found: SchemaState) -> None:
    """Refuses a database, or an outbox alone, of code that is newer than this."""
    if found.version > latest() or found.release > RELEASE:
        raise SchemaNewer(
            f"the database is at {found}, this code at {wanted()}", "Upgrade this installation of Custody."
        )


def check(connection: Connection) -> None:
    """Refuses a database whose schema is not the one of this code."""
    found = state(connection)
    remedy = "Run `custody migrate` once, with no older version of Custody still at work."
    if found is None:
        raise SchemaMissing("the database has no Custody schema", remedy)
    refuse_newer(found)
    if found != wanted():
        raise SchemaOlder(f"the database is at {found}, this code at {wanted()}", remedy)


def lock(connection: Connection) -> None:
    """One at a time may change the schema, until the transaction ends. No timeout of the database's cuts it off."""
    connection.execute("SET LOCAL statement_timeout = 0")  # the default is for traffic; waiting may take longer
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])


def migrate(url: str) -> list[int]:
    """Brings a database to this code's schema; does nothing if it is there. Safe to run by several at once.

    Returns the versions that were applied. All of it is one transaction: it happens whole or not at all. Refuses a
    database that is newer, and one in which objects of a user hang on what has to be made anew.
    """
    with translated(), BoundedConnection.connect(url) as connection:
        lock(connection)
        connection.execute("SET LOCAL check_function_bodies = off")
        found = state(connection)
        outbox = outbox_state(connection) if found is None else None
        refuse_newer(found or outbox or SchemaState(0, 0, ""))
        if found == wanted():
            return []
        connection.execute("CREATE SCHEMA IF NOT EXISTS custody")
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
        connection.execute("DELETE FROM custody.release")
        connection.execute("INSERT INTO custody.release (release, digest) VALUES (%s, %s)", [RELEASE, digest])
        return [version for version, _ in applied]


def make_outbox(connection: Connection, found: SchemaState | None) -> None:
    """The tables of the outbox: new ones, or those of an outbox that was installed alone, brought to this version."""
    if found is None:
        connection.execute(script_of(f"schema/{OUTBOX}"))
    else:
        _run([one for one in migrations() if one.name.startswith(OUTBOX) and one.version > found.version], connection)


def _run(pending: list[Migration], connection: Connection) -> list[tuple[int, str]]:
    for migration in pending:
        connection.execute(migration.script)
    return [(migration.version, migration.name) for migration in pending]


def drop_functions(connection: Connection) -> None:
    """Removes every view, routine and composite type of the schema: they hold nothing, and all come back.

    What a user has built on them would not come back, so that is refused; and nothing is dropped with CASCADE.
    """
    dependents = [name for (name,) in connection.execute(_script("dependents.sql")).fetchall()]
    if dependents:
        raise SchemaInUse(
            f"objects of yours hang on views or functions that have to be made anew: {', '.join(dependents)}",
            "Drop them, migrate, and create them again. Nothing was changed.",
        )
    # triggers of our own tables that call our functions come back with them; those of a user stay
    for name, table in connection.execute(
        "SELECT tgname, tgrelid::regclass::text FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid "
        "JOIN pg_proc f ON f.oid = t.tgfoid WHERE c.relnamespace = 'custody'::regnamespace AND c.relkind = 'r' "
        "AND f.pronamespace = 'custody'::regnamespace AND NOT t.tgisinternal"
    ).fetchall():
        connection.execute(sql.SQL("DROP TRIGGER {} ON {}").format(sql.Identifier(name), sql.SQL(table)))
    for kind, names in (
        ("VIEW", "SELECT oid::regclass::text FROM pg_class WHERE relkind = 'v' AND relnamespace"),
        ("ROUTINE", "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace"),
        ("TYPE", "SELECT reltype::regtype::text FROM pg_class WHERE relkind = 'c' AND relnamespace"),
    ):
        rows = connection.execute(sql.SQL("{} = 'custody'::regnamespace").format(sql.SQL(names))).fetchall()
        if rows:
            # all of a kind at once: those that hang on one another are no obstacle then
            every = sql.SQL(", ").join(sql.SQL(name) for (name,) in rows)
            connection.execute(sql.SQL("DROP {} {}").format(sql.SQL(kind), every))
