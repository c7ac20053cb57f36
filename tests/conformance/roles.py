"""Roles of the database with the least rights, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

import custody
from custody import Custody
from custody.engine.transactions import Transactions
from custody.store.roles import ROLES
from custody.wire.verb import declared

ADMIN = {"create_api_key", "api_keys", "revoke_api_key", "update_group", "bind", "set_retention", "grow_topic"}
ADMIN |= {"ensure_topic", "ensure_group", "ensure_schedule"}
"""Methods that need the right `admin` and declare none, because HTTP has no operation of their own for them."""


def name_of(role: str) -> str:
    """Roles belong to the whole server, which several processes of tests may use."""
    return f"test_{role}_{os.getpid()}"


def as_role(url: str, role: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}options=-c%20role%3D{name_of(role)}"


@contextmanager
def granting(url: str) -> Iterator[None]:
    """Makes a role for each role of Custody, with its rights in this database. Another test of this process may have
    made them, for another database."""
    missing = []
    with psycopg.connect(url, autocommit=True) as connection:
        for role in ROLES:
            found = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [name_of(role)]).fetchone()
            if found is None:
                missing.append(role)
                connection.execute(sql.SQL("CREATE ROLE {}").format(sql.Identifier(name_of(role))))
    with custody.connect(url) as c:
        for role in ROLES:
            c.grants(role, to=name_of(role))
    try:
        yield
    finally:
        with psycopg.connect(url, autocommit=True) as connection:
            for role in ROLES:
                connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name_of(role))))
            for role in missing:
                connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name_of(role))))


class ByRight:
    """Calls each verb as the role that has the right to it: verbs of operators as the one, the others as the other."""

    def __init__(self, app: Any, operator: Any, verbs: type = Custody) -> None:
        self._app, self._operator, self._verbs = app, operator, declared(verbs)

    def __getattr__(self, name: str) -> Any:
        if name == "transactions":
            return ByRight(self._app.transactions, self._operator.transactions, Transactions)
        admin = self._verbs[name].right == "admin" if name in self._verbs else name in ADMIN
        return getattr(self._operator if admin else self._app, name)
