"""The schema's versions: made once, kept in a ledger, refused when they do not fit the code."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import psycopg
import pytest

import custody
from custody.errors import CustodyError, SchemaInUse, SchemaMissing, SchemaNewer, SchemaOlder
from custody.store import migrate
from custody.store.functions import functions

pytestmark = pytest.mark.core

LATEST = migrate.latest()

CATALOG = """
SELECT 'function', p.oid::regprocedure::text, pg_get_functiondef(p.oid)
FROM pg_proc p WHERE p.pronamespace = 'custody'::regnamespace
UNION ALL
SELECT 'view', viewname::text, definition FROM pg_views WHERE schemaname = 'custody'
UNION ALL
SELECT c.relkind::text, c.relname::text, concat_ws(' ', row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum),
       a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull)
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = 'custody'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT 'constraint', conname, conrelid::regclass || ' ' || pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = 'custody'::regnamespace
UNION ALL
SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'custody'
ORDER BY 1, 2, 3
"""


def one(url: str, query: str, *values: Any) -> Any:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(query, values).fetchall()


def change(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)


def ledger(url: str) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = one(url, "SELECT version, name FROM custody.migrations ORDER BY version")
    return found


def supply(monkeypatch: pytest.MonkeyPatch, *steps: tuple[str, str]) -> int:
    """Makes this code one that has migrations, each with a name and a script; returns its version."""
    more = [
        migrate.Migration(version=version, name=name, script=script)  # type: ignore[arg-type]  # text of this test
        for version, (name, script) in enumerate(steps, LATEST + 1)
    ]
    known = migrate.migrations()
    monkeypatch.setattr(migrate, "migrations", lambda: (*known, *more))
    return more[-1].version


def test_a_new_database_has_the_latest_version(bare_url: str) -> None:
    assert custody.migrate(bare_url) == [LATEST]
    assert ledger(bare_url) == [(LATEST, "schema")]
    assert one(bare_url, "SELECT release, digest FROM custody.release") == [(migrate.RELEASE, functions()[1])]


def test_versions_are_numbered_without_gaps() -> None:
    versions = [migration.version for migration in migrate.migrations()]
    assert versions == list(range(2, len(versions) + 2))


def test_an_older_database_is_refused_until_its_migrations_ran_and_keeps_its_messages(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("orders")
        c.publish("orders", 1)
    newest = supply(
        monkeypatch,
        ("colour", "ALTER TABLE custody.topics ADD COLUMN colour text"),
        ("red", "UPDATE custody.topics SET colour = 'red'"),
    )
    with pytest.raises(SchemaOlder, match=rf"at schema version {LATEST},.* at schema version {newest}, .*migrate"):
        custody.connect(database_url)
    assert custody.migrate(database_url) == [newest - 1, newest]
    assert ledger(database_url) == [(LATEST, "schema"), (newest - 1, "colour"), (newest, "red")]
    assert custody.migrate(database_url) == []
    assert one(database_url, "SELECT colour FROM custody.topics") == [("red",)]
    with custody.connect(database_url) as c:
        c.publish("orders", 2)
        assert [m.payload for m in c.read("orders")] == [1, 2]


def test_a_new_database_needs_no_migration(bare_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = supply(monkeypatch, ("colour", "ALTER TABLE custody.topics ADD COLUMN colour text"))
    assert custody.migrate(bare_url) == [newest]
    assert ledger(bare_url) == [(newest, "schema")]
    assert one(bare_url, "SELECT FROM pg_attribute WHERE attname = 'colour'") == [], "the schema has what it needs"


def test_an_upgraded_database_is_what_a_new_one_is(
    bare_url: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    custody.migrate(bare_url)
    change(database_url, "ALTER TABLE custody.producer_receipts DROP COLUMN deliver_at")
    change(database_url, "DROP INDEX custody.segments_kept")
    assert one(database_url, CATALOG) != one(bare_url, CATALOG)
    supply(
        monkeypatch,
        (
            "back",
            "ALTER TABLE custody.producer_receipts ADD COLUMN deliver_at timestamptz[], "
            "ADD CONSTRAINT producer_receipts_check2 CHECK (cardinality(deliver_at) = cardinality(partitions)); "
            "CREATE INDEX segments_kept ON custody.segments (topic_id, segment_id) WHERE dropped_at IS NULL",
        ),
    )
    custody.migrate(database_url)
    assert one(database_url, CATALOG) == one(bare_url, CATALOG)


def test_a_migration_that_fails_leaves_the_older_version(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = one(database_url, CATALOG)
    with monkeypatch.context() as newer:
        supply(newer, ("colour", "ALTER TABLE custody.topics ADD COLUMN colour text"), ("wrong", "SELECT 1 / 0"))
        with pytest.raises(CustodyError, match="division by zero"):
            custody.migrate(database_url)
    assert one(database_url, CATALOG) == before
    assert ledger(database_url) == [(LATEST, "schema")]
    custody.connect(database_url).close()


def test_an_outbox_alone_runs_its_own_migrations_only(bare_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    custody.outbox.install(bare_url)
    newest = supply(
        monkeypatch,
        ("outbox_colour", "ALTER TABLE custody.outbox ADD COLUMN colour text"),
        ("topics_colour", "ALTER TABLE custody.topics ADD COLUMN colour text"),
    )
    with pytest.raises(SchemaOlder, match=f"at schema version {newest - 1}"):
        custody.outbox.Outbox(bare_url)
    assert custody.outbox.install(bare_url) is True
    assert one(bare_url, "SELECT version FROM custody.outbox_installed") == [(newest - 1,)]
    assert one(bare_url, "SELECT attrelid::regclass::text FROM pg_attribute WHERE attname = 'colour'") == [
        ("custody.outbox",)
    ]
    assert custody.outbox.install(bare_url) is False
    custody.outbox.Outbox(bare_url).close()


def test_an_older_outbox_alone_is_upgraded_when_all_of_custody_comes(
    bare_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    custody.outbox.install(bare_url)
    with psycopg.connect(bare_url) as connection:
        event = custody.outbox.write(connection, event_type="e", payload=1, destination="test:")
    newest = supply(monkeypatch, ("outbox_colour", "ALTER TABLE custody.outbox ADD COLUMN colour text"))
    assert custody.migrate(bare_url) == [newest]
    assert one(bare_url, "SELECT event_id, colour FROM custody.outbox") == [(event, None)]


def test_a_second_run_does_nothing(database_url: str) -> None:
    before = one(database_url, "SELECT * FROM custody.migrations"), one(database_url, "SELECT * FROM custody.release")
    assert custody.migrate(database_url) == []
    after = one(database_url, "SELECT * FROM custody.migrations"), one(database_url, "SELECT * FROM custody.release")
    assert after == before


def test_connecting_to_an_empty_database_makes_the_schema(bare_url: str) -> None:
    with custody.connect(bare_url) as c:
        c.create_topic("orders")
        assert c.publish("orders", 1).offset == 0
    assert one(bare_url, "SELECT count(*) FROM custody.migrations") == [(1,)]


MIGRATE = "import sys, custody; print(custody.migrate(sys.argv[1]))"
UPGRADE = (
    "from custody.store import migrate; "
    f"step = migrate.Migration(version={LATEST + 1}, name='colour', "
    "script='ALTER TABLE custody.topics ADD COLUMN colour text'); "
    "migrate.migrations = lambda: (step,); " + MIGRATE
)


@pytest.mark.parametrize(("program", "applied"), [(MIGRATE, [LATEST]), (UPGRADE, [LATEST + 1])])
def test_two_processes_that_migrate_at_once_are_safe(bare_url: str, program: str, applied: list[int]) -> None:
    if program is UPGRADE:
        custody.migrate(bare_url)
    command = [sys.executable, "-c", program, bare_url]
    together = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].strip() for process in together]
    assert [process.returncode for process in together] == [0, 0]
    assert sorted(answers) == sorted([str(applied), "[]"])


def test_a_newer_schema_is_refused(database_url: str) -> None:
    newer = LATEST + 1
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
    change(database_url, f"UPDATE custody.release SET release = {newer}, oldest = {newer}, digest = 'another'")
    for verb in (custody.connect, custody.migrate):
        with pytest.raises(SchemaNewer, match=rf"release {newer} \(functions another\), this code at .*Upgrade this"):
            verb(database_url)
    assert one(database_url, "SELECT release, digest FROM custody.release") == [(newer, "another")]


def test_an_older_version_is_refused(database_url: str) -> None:
    change(database_url, "DELETE FROM custody.migrations WHERE version = (SELECT max(version) FROM custody.migrations)")
    change(database_url, "INSERT INTO custody.migrations (version, name) VALUES (0, 'long ago') ON CONFLICT DO NOTHING")
    with pytest.raises(SchemaOlder):
        custody.connect(database_url)


def test_a_missing_schema_is_named(bare_url: str) -> None:
    with psycopg.connect(bare_url) as connection, pytest.raises(SchemaMissing, match=r"custody.migrate"):
        migrate.check(connection)


def test_after_a_change_of_release_the_schema_is_what_a_fresh_one_is(bare_url: str, database_url: str) -> None:
    custody.migrate(bare_url)
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
    assert one(database_url, CATALOG) == one(bare_url, CATALOG)


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


def test_a_migration_happens_whole_or_not_at_all(bare_url: str) -> None:
    change(bare_url, "CREATE SCHEMA custody")
    change(bare_url, "CREATE TABLE custody.journal (in_the_way int)")
    with pytest.raises(CustodyError, match="already exists"):
        custody.migrate(bare_url)
    tables = one(bare_url, "SELECT relname FROM pg_class WHERE relnamespace = 'custody'::regnamespace")
    assert tables == [("journal",)]
    change(bare_url, "DROP TABLE custody.journal")
    assert custody.migrate(bare_url) == [LATEST]
