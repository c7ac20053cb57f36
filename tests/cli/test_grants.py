"""`custody grants` prints the statements that it would run, or runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from tests.cli.conftest import Run

pytestmark = [pytest.mark.req("X13"), pytest.mark.own_database]

ROLE = f"shop reader {os.getpid()}"
SEES = "SELECT has_schema_privilege(%s, 'custody', 'USAGE'), has_table_privilege(%s, 'custody.topics', 'SELECT')"


@pytest.fixture
def role(db: psycopg.Connection) -> Iterator[str]:
    name = sql.Identifier(ROLE)
    db.execute(sql.SQL("CREATE ROLE {}").format(name))
    yield ROLE
    db.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(name))


def sees(db: psycopg.Connection) -> object:
    return db.execute(SEES, [ROLE, ROLE]).fetchone()


def test_the_script_is_what_apply_does(quick: Run, db: psycopg.Connection, role: str) -> None:
    script = quick("grants", "--role", "readonly", "--to", role).out
    assert sees(db) == (False, False), "printed only"
    db.execute(script.encode())
    assert sees(db) == (True, True)
    assert quick("grants", "--revoke", "--to", role, "--apply").out.startswith(f"{role} has no rights")
    assert sees(db) == (False, False)
    assert (
        "the rights of role readonly, and no others"
        in quick("grants", "--role", "readonly", "--to", role, "--apply").out
    )
    assert sees(db) == (True, True)
    assert quick("--json", "grants", "--role", "app", "--to", role).document["applied"] is False


def test_what_is_missing_is_named(quick: Run) -> None:
    assert "readonly, producer, app, worker, operator" in quick("grants", code=2).err
    assert "--revoke needs --to" in quick("grants", "--revoke", code=2).err
    assert 'CREATE ROLE "custody_app"' in quick("grants", "--role", "app", code=1).err
    assert "reader" in quick("grants", "--role", "reader", code=2).err
