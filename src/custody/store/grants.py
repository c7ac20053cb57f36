"""Grants in the schema for a role of the database: all statements, in the order in which they are run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from psycopg import sql

from custody.errors import InvalidArgument, PermissionDenied
from custody.store.functions import read_script
from custody.store.postgres import Connection
from custody.store.rights import Rights
from custody.store.roles import Role, rights_of

_PARTS = ((re.compile(r"log_\d+"), "log"), (re.compile(r"staged_.+"), "suspects"))
"""Tables that are made while Custody runs, and those whose grants they get (`grant_as` in base/guards.sql)."""


def give(connection: Connection, role: Role | None, to: str, *, apply: bool) -> list[str]:
    """Gives a role of the database exactly the rights of a role of Custody, or none at all. Returns the statements."""
    _require_role(connection, to)
    script = _statements(connection, role, to)
    for statement in script if apply else ():
        connection.execute(statement)
    return [statement.as_string(connection) for statement in script]


def give_again(connection: Connection) -> None:
    """After a migration: takes the functions from PUBLIC, and gives each recorded role the rights of this release."""
    connection.execute(read_script("public.sql"))
    recorded = connection.execute(
        "SELECT g.grantee, g.role FROM custody.granted g JOIN pg_roles r ON r.rolname = g.grantee"
    ).fetchall()
    for to, role in recorded:
        for statement in _statements(connection, role, to):
            connection.execute(statement)


def _statements(connection: Connection, role: Role | None, to: str) -> list[sql.Composed]:
    grantee = sql.Identifier(to)
    script = [
        sql.SQL("REVOKE ALL ON ALL {} IN SCHEMA custody FROM {}").format(sql.SQL(kind), grantee)
        for kind in ("TABLES", "SEQUENCES", "ROUTINES")
    ]
    if role is None:
        script.append(sql.SQL("REVOKE ALL ON SCHEMA custody FROM {}").format(grantee))
        script.append(sql.SQL("DELETE FROM custody.granted WHERE grantee = {}").format(sql.Literal(to)))
        return script
    script.append(sql.SQL("GRANT USAGE ON SCHEMA custody TO {}").format(grantee))
    script += [sql.SQL("{} TO {}").format(given, grantee) for given in _given(connection, rights_of(role))]
    record = (
        "INSERT INTO custody.granted (grantee, role) VALUES ({}, {}) "
        "ON CONFLICT (grantee) DO UPDATE SET role = excluded.role, granted_at = now()"
    )
    script.append(sql.SQL(record).format(sql.Literal(to), sql.Literal(role)))
    return script


def _given(connection: Connection, rights: Rights) -> Iterator[sql.Composed]:
    by_privileges: dict[str, list[sql.Composable]] = {}
    for name, kind in connection.execute(read_script("relations.sql")).fetchall():
        like = next((table for pattern, table in _PARTS if pattern.fullmatch(name)), name)
        privileges = ", ".join(sorted(rights.relations.get(like, ())))
        if privileges:
            on = "SEQUENCE " if kind == "S" else ""
            by_privileges.setdefault(f"{privileges} ON {on}", []).append(sql.Identifier("custody", name))
    for what, names in sorted(by_privileges.items()):
        # the text is made of words of this package
        yield sql.SQL("GRANT {}{}").format(sql.SQL(what), sql.SQL(", ").join(names))
    routines = connection.execute(
        "SELECT oid::regprocedure::text FROM pg_proc WHERE pronamespace = 'custody'::regnamespace "
        "AND proname = ANY (%s) ORDER BY 1",
        [sorted(rights.functions)],
    ).fetchall()
    yield sql.SQL("GRANT EXECUTE ON FUNCTION {}").format(sql.SQL(", ").join(sql.SQL(name) for (name,) in routines))


def _require_role(connection: Connection, to: str) -> None:
    """Refuses a role that does not exist, or that owns the schema, and a session that may not grant."""
    row = connection.execute(
        "SELECT r.rolname IS NOT NULL, n.nspowner = r.oid, pg_has_role(n.nspowner, 'USAGE'), "
        "pg_get_userbyid(n.nspowner), current_user FROM pg_namespace n LEFT JOIN pg_roles r ON r.rolname = %s "
        "WHERE n.nspname = 'custody'",
        [to],
    ).fetchone()
    assert row is not None, "the schema was checked"
    exists, owns, may, owner, me = row
    if not exists:
        raise InvalidArgument(
            f"the database has no role {to!r}", f"Create it first: CREATE ROLE {sql.Identifier(to).as_string()} LOGIN."
        )
    if owns:
        raise InvalidArgument(f"{to!r} owns the schema of Custody and may do everything", "Name another role.")
    if not may:
        raise PermissionDenied(
            f"{me!r} may not grant rights on Custody's schema", f"Run it as its owner, {owner!r}, or a superuser."
        )
