"""What a migration would do: its steps, the locks that each takes, and how long it holds them. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from custody.store import migrate
from custody.store.connecting import BoundedConnection
from custody.store.functions import RELEASE, read_script
from custody.store.postgres import Connection, translated

Takes = Literal["instant", "scans", "rewrites"]
"""`instant`: changes the catalog, whatever the size of the tables. `scans`: reads a whole table, or builds an index.
`rewrites`: writes all rows of a table anew."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. All steps of a migration are one transaction, so the locks of a step are held until its end."""

    version: int | None
    """None for the step that replaces functions and views."""
    name: str
    locks: tuple[str, ...]
    """Tables and views with the mode of the lock."""
    takes: Takes
    before: str
    """A statement to run beforehand, after which the step is instant. Empty if there is none."""
    sql: str
    """What is executed; empty for functions and views."""


def plan(url: str) -> list[Step]:
    """The steps that `migrate` would take. Refuses what `migrate` refuses: a newer database, and objects of a user
    that depend on what is replaced."""
    with translated(), BoundedConnection.connect(url, autocommit=True) as connection:
        found = migrate.state(connection)
        outbox = migrate.outbox_state(connection) if found is None else None
        migrate.refuse_newer(found or outbox or migrate.SchemaState(0, 0, ""))
        if found == migrate.wanted():
            return []
        if found is not None or outbox is not None:
            migrate.refuse_dependents(connection)
        if found is None:
            name = "all tables" if outbox is None else "all tables, beside those of the outbox"
            steps = [Step(version=migrate.latest(), name=name, locks=(), takes="instant", before="", sql="")]
        else:
            steps = [_step(one) for one in migrate.migrations() if one.version > found.version]
        return [*steps, _functions(connection)]


def _step(migration: migrate.Migration) -> Step:
    return Step(
        version=migration.version,
        name=migration.name,
        locks=tuple(part.strip() for part in migration.said("locks").split(",") if part.strip()),
        takes=cast("Takes", migration.said("takes")),
        before=migration.said("before"),
        sql=migration.script,
    )


def _functions(connection: Connection) -> Step:
    names = [name for (name,) in connection.execute(read_script("replaced.sql")).fetchall()]
    return Step(
        version=None,
        name=f"functions and views of release {RELEASE}",
        locks=tuple(f"{name} ACCESS EXCLUSIVE" for name in names),
        takes="instant",
        before="",
        sql="",
    )
