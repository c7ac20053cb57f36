"""The schema's versions: made once, kept in a ledger, refused when they do not fit the code."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.conftest import url_of

import custody
from custody.errors import CustodyError, SchemaInUse, SchemaMissing, SchemaNewer, SchemaOlder
from custody.store import migrate

pytestmark = pytest.mark.core

VERSIONS = [migration.version for migration in migrate.migrations()]
_numbers = itertools.count()

CATALOG = """
SELECT 'function', p.oid::regprocedure::text, pg_get_functiondef(p.oid)
FROM pg_proc p WHERE p.pronamespace = 'custody'::regnamespace
UNION ALL
SELECT 'view', viewname::text, definition FROM pg_views WHERE schemaname = 'custody'
UNION ALL
SELECT c.relkind::text, c.relname::text, a.attnum || a.attname || format_type(a.atttypid, a.atttypmod) || a.attnotnull
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = 'custody'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY 1, 2, 3
"""


def one(url: str, query: str, *values: Any) -> Any:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query, values).fetchall()


def change(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


@pytest.fixture
def empty_url(server_url: str) -> Iterator[str]:
    """A database without Custody's schema."""
    name = f"custody_empty_{next(_numbers)}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        yield url_of(server_url, name)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_the_ledger_says_what_was_applied(empty_url: str) -> None:
    assert custody.migrate(empty_url) == VERSIONS
    ledger = one(empty_url, "SELECT version, name FROM custody.migrations ORDER BY version")
    assert ledger == [(migration.version, migration.name) for migration in migrate.migrations()]
    assert one(empty_url, "SELECT release, digest FROM custody.release") == [(migrate.RELEASE, migrate.functions()[1])]


def test_versions_are_numbered_without_gaps() -> None:
    assert list(range(1, len(VERSIONS) + 1)) == VERSIONS


def test_a_second_run_does_nothing(database_url: str) -> None:
    before = one(database_url, "SELECT * FROM custody.migrations"), one(database_url, "SELECT * FROM custody.release")
    assert custody.migrate(database_url) == []
    after = one(database_url, "SELECT * FROM custody.migrations"), one(database_url, "SELECT * FROM custody.release")
    assert after == before


def test_connecting_to_an_empty_database_makes_the_schema(empty_url: str) -> None:
    with custody.connect(empty_url) as c:
        c.create_topic("orders")
        assert c.publish("orders", 1).offset == 0
    assert one(empty_url, "SELECT count(*) FROM custody.migrations") == [(len(VERSIONS),)]


def test_two_processes_that_migrate_at_once_are_safe(empty_url: str) -> None:
    program = "import sys, custody; print(custody.migrate(sys.argv[1]))"
    command = [sys.executable, "-c", program, empty_url]
    together = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].strip() for process in together]
    assert [process.returncode for process in together] == [0, 0]
    assert sorted(answers) == sorted([str(VERSIONS), "[]"])


def test_a_newer_schema_is_refused(database_url: str) -> None:
    newer = VERSIONS[-1] + 1
    change(database_url, f"INSERT INTO custody.migrations (version, name) VALUES ({newer}, 'tomorrow')")
    before = one(database_url, "SELECT * FROM custody.release")
    for verb in (custody.connect, custody.migrate):
        with pytest.raises(SchemaNewer, match=rf"schema version {newer}, .*this code at .*Upgrade this"):
            verb(database_url)
    assert one(database_url, "SELECT * FROM custody.release") == before


@pytest.mark.parametrize("older", ["digest = 'another'", "release = release - 1"])
def test_functions_of_an_older_release_or_another_digest_are_refused_until_migrated(
    database_url: str, older: str
) -> None:
    change(database_url, f"UPDATE custody.release SET {older}")
    with pytest.raises(SchemaOlder, match=r"release \d+ \(functions .*custody.migrate"):
        custody.connect(database_url)
    assert custody.migrate(database_url) == []
    custody.connect(database_url).close()


def test_functions_of_a_newer_release_are_refused_and_never_replaced(database_url: str) -> None:
    newer = migrate.RELEASE + 1
    change(database_url, f"UPDATE custody.release SET release = {newer}, digest = 'another'")
    for verb in (custody.connect, custody.migrate):
        with pytest.raises(SchemaNewer, match=rf"release {newer} \(functions another\), this code at .*Upgrade this"):
            verb(database_url)
    assert one(database_url, "SELECT release, digest FROM custody.release") == [(newer, "another")]


def test_an_older_version_is_refused(database_url: str) -> None:
    change(database_url, "DELETE FROM custody.migrations WHERE version = (SELECT max(version) FROM custody.migrations)")
    change(database_url, "INSERT INTO custody.migrations (version, name) VALUES (0, 'long ago') ON CONFLICT DO NOTHING")
    with pytest.raises(SchemaOlder):
        custody.connect(database_url)


def test_a_missing_schema_is_named(empty_url: str) -> None:
    with psycopg.connect(empty_url) as connection, pytest.raises(SchemaMissing, match=r"custody.migrate"):
        migrate.check(connection)


def test_after_a_change_of_release_the_schema_is_what_a_fresh_one_is(empty_url: str, database_url: str) -> None:
    custody.migrate(empty_url)
    with custody.connect(database_url) as c:
        c.create_topic("orders")
        c.create_group("orders", "stock")
        c.publish_many("orders", [1, 2, 3])
        c.claim("orders", "stock").nack(delay="1h")
    change(database_url, "CREATE FUNCTION custody.left_over(a custody.settled) RETURNS int LANGUAGE sql RETURN 1")
    change(database_url, "CREATE OR REPLACE VIEW custody.in_flight_old AS SELECT * FROM custody.in_flight")
    change(
        database_url,
        "CREATE OR REPLACE FUNCTION custody.cardinality(p_set int8multirange) RETURNS bigint LANGUAGE sql RETURN -1",
    )
    change(database_url, "UPDATE custody.release SET digest = 'another'")
    custody.migrate(database_url)
    with custody.connect(database_url) as c:
        assert [m.payload for m in c.claim("orders", "stock", max_messages=9)] == [2, 3]
        c.delete_topic("orders")
    assert one(database_url, CATALOG) == one(empty_url, CATALOG)


MINE = {
    "view mine": "CREATE VIEW mine AS SELECT payload FROM custody.dead_letters",
    "index mine": "CREATE TABLE orders (k text); CREATE INDEX mine ON orders (custody.partition_for(k, 4))",
    "column bin of table orders": "CREATE TABLE orders (k text, "
    "bin int GENERATED ALWAYS AS (custody.partition_for(k, 4)) STORED)",
    "materialized view mine": "CREATE MATERIALIZED VIEW mine AS SELECT * FROM custody.history",
    "column letters of table mine": "CREATE TABLE mine (letters custody.dead_letters[])",
    "function mine(text)": "CREATE FUNCTION mine(k text) RETURNS int LANGUAGE sql RETURN custody.partition_for(k, 4)",
    "trigger mine on view custody.events": "CREATE FUNCTION mine() RETURNS trigger LANGUAGE plpgsql AS "
    "'BEGIN RETURN NULL; END'; "
    "CREATE TRIGGER mine INSTEAD OF INSERT ON custody.events FOR EACH ROW EXECUTE FUNCTION mine()",
}


@pytest.mark.parametrize("name", MINE)
def test_what_a_user_has_built_on_the_schema_is_named_and_never_dropped(database_url: str, name: str) -> None:
    change(database_url, MINE[name])
    change(database_url, "UPDATE custody.release SET digest = 'another'")
    before = one(database_url, CATALOG)
    with pytest.raises(SchemaInUse, match=rf"{re.escape(name)}\. Drop them, migrate, and create them again"):
        custody.migrate(database_url)
    assert one(database_url, CATALOG) == before
    assert one(database_url, "SELECT digest FROM custody.release") == [("another",)]


def test_what_a_user_has_built_on_the_tables_alone_is_in_nobodys_way(database_url: str) -> None:
    change(database_url, "CREATE VIEW mine AS SELECT name FROM custody.topics")
    change(database_url, "UPDATE custody.release SET digest = 'another'")
    assert custody.migrate(database_url) == []
    assert one(database_url, "SELECT * FROM mine") == []


def test_a_migration_happens_whole_or_not_at_all(empty_url: str) -> None:
    change(empty_url, "CREATE SCHEMA custody")
    change(empty_url, "CREATE TABLE custody.journal (in_the_way int)")
    with pytest.raises(CustodyError, match="already exists"):
        custody.migrate(empty_url)
    tables = one(empty_url, "SELECT relname FROM pg_class WHERE relnamespace = 'custody'::regnamespace")
    assert tables == [("journal",)]
    change(empty_url, "DROP TABLE custody.journal")
    assert custody.migrate(empty_url) == VERSIONS
