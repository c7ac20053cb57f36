"""A migration takes the locks that its plan names, lets others go on while it cannot have them, and happens whole or
not at all."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.integration.test_migrate import CATALOG, one
from tests.upgrades.conftest import MIGRATE, Releases
from tests.upgrades.processes import running
from tests.upgrades.releases import environment, program
from tests.waiting import wait_for

import custody

Find = Callable[[str], list[tuple[int, int]]]

pytestmark = [pytest.mark.req("X13"), pytest.mark.chaos]

OURS = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'custody migrate'"
WAITING = f"{OURS} AND wait_event_type = 'Lock'"
TAKEN = """
import json, sys, psycopg
from custody.store import migrate, plan
RELATIONS = "SELECT oid, relname, relfilenode, relkind FROM pg_class WHERE relnamespace = 'custody'::regnamespace"
LOCKS = "SELECT relation, mode FROM pg_locks WHERE pid = pg_backend_pid() AND granted AND locktype = 'relation'"
MODES = {"ShareLock": "SHARE", "AccessExclusiveLock": "ACCESS EXCLUSIVE"}  # the stronger one last
planned = plan.plan(sys.argv[1])
found = {}
with psycopg.connect(sys.argv[1]) as connection:
    before = {row[0]: row[1:] for row in connection.execute(RELATIONS).fetchall() if row[3] in ("r", "v", "p")}
    connection.rollback()

    def run(what):
        what()
        held = connection.execute(LOCKS).fetchall()
        strongest = {before[at][0]: MODES[m] for m in MODES for at, mode in held if at in before and mode == m}
        locks = sorted(f"{name} {mode}" for name, mode in strongest.items())
        files = {row[0]: row[2] for row in connection.execute(RELATIONS).fetchall()}
        rewritten = any(files.get(at, kept[1]) != kept[1] for at, kept in before.items())
        indexed = connection.execute("SELECT count(*) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
            "WHERE c.xmin = pg_current_xact_id()::xid AND i.indrelid = ANY (%s)", [list(before)]).fetchone()[0]
        connection.rollback()
        return locks, "rewrites" if rewritten else "scans" if indexed else "instant"

    for step in planned:
        if step.version is not None:
            found[step.version] = (*run(lambda: connection.execute(step.sql)), sorted(step.locks), step.takes)
    migrate.migrations = lambda: ()
    locks, took = run(lambda: (migrate.lock(connection), migrate._migrate(connection)))
    found["functions"] = (locks, "instant", sorted(planned[-1].locks), planned[-1].takes)
print(json.dumps(found))
"""


@pytest.fixture
def holding(old_url: str) -> Any:
    """A transaction of somebody who does not end it, and has read one of the views."""
    with psycopg.connect(old_url, application_name="report") as connection:
        connection.execute("SELECT count(*) FROM custody.dead_letters")
        yield connection


def migrating(package: Path, url: str) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", MIGRATE, url], subprocess.PIPE
    return subprocess.Popen(command, env=environment(package), stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("release", ["second", "third"])
def test_the_plan_names_the_locks_that_are_taken(made: Releases, old_url: str, release: str) -> None:
    (line,) = program(getattr(made, release), TAKEN, old_url)
    found = json.loads(line)
    assert set(found) == {"2", "3", "functions"} | ({"4"} if release == "third" else set())
    for step, (taken, took, planned, takes) in found.items():
        assert (taken, took) == (planned, takes), step


def test_what_a_migration_waits_for_stops_nobody_else(
    made: Releases, old_url: str, holding: psycopg.Connection[Any], release_of: Find
) -> None:
    with running(made.first, old_url, "old") as old:
        old.goes_on()
        process = migrating(made.second, old_url)
        try:
            with psycopg.connect(old_url, autocommit=True) as other:
                for _ in range(2):  # it waits, gives up, and tries again
                    wait_for(lambda: other.execute(WAITING).fetchone() == (1,), "the migration waits")
                    wait_for(lambda: other.execute(WAITING).fetchone() == (0,), "the migration lets others go on")
                    old.goes_on()
            assert release_of(old_url) == [(1, 1)]
            holding.rollback()
            output, errors = process.communicate(timeout=60)
            assert (output, process.returncode) == ("[2, 3]\n", 0), errors
        finally:
            process.kill()
        old.goes_on()
        assert old.end()["errors"] == []


def test_it_gives_up_in_the_end_and_says_who_is_in_its_way(
    made: Releases, old_url: str, holding: psycopg.Connection[Any]
) -> None:
    before = one(old_url, CATALOG)
    text = (
        "import sys, custody\ntry:\n    custody.migrate(sys.argv[1], wait='1s')\n"
        "except custody.CustodyError as error:\n    print(error.code, error.message, error.remedy)"
    )
    (line,) = program(made.second, text, old_url)
    assert line.startswith("busy the migration waited 1 s for locks, and changed nothing; they are held by pid ")
    assert f"pid {holding.info.backend_pid} (report, since " in line
    assert "custody migrate --wait 10m" in line
    assert one(old_url, CATALOG) == before


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_it_is_interrupted_and_leaves_nothing_half_done(
    made: Releases, old_url: str, holding: psycopg.Connection[Any], release_of: Find, how: signal.Signals
) -> None:
    before = one(old_url, CATALOG)
    process = migrating(made.second, old_url)
    try:
        with psycopg.connect(old_url, autocommit=True) as other:
            wait_for(lambda: other.execute(WAITING).fetchone() == (1,), "the migration waits in the middle")
            process.send_signal(how)
            process.communicate(timeout=20)
            wait_for(lambda: other.execute(OURS).fetchone() == (0,), "the server has noticed")
    finally:
        process.kill()
    assert process.returncode != 0
    assert one(old_url, CATALOG) == before
    assert release_of(old_url) == [(1, 1)]
    holding.rollback()
    assert program(made.second, MIGRATE, old_url) == ["[2, 3]"]


def test_two_upgrades_at_once_apply_each_step_once(made: Releases, old_url: str, release_of: Find) -> None:
    together = [migrating(made.second, old_url) for _ in range(2)]
    answers = [process.communicate(timeout=60) for process in together]
    assert sorted(output for output, _ in answers) == ["[2, 3]\n", "[]\n"], answers
    assert release_of(old_url) == [(2, 3)]


def test_the_command_shows_a_plan_and_the_statements_and_changes_nothing(made: Releases, old_url: str) -> None:
    before = one(old_url, CATALOG)

    def run(*options: str, verb: str = "migrate", release: Path = made.third) -> str:
        command = [sys.executable, "-m", "custody", verb, "--database", old_url, *options]
        done = subprocess.run(command, env=environment(release), capture_output=True, text=True, check=True)
        return done.stdout

    shown = run("--plan")
    assert "version 2: colour (instant)\n  locks topics ACCESS EXCLUSIVE\n" in shown
    assert "version 3: by_worker (scans)\n  locks cases SHARE\n  run before: CREATE INDEX CONCURRENTLY" in shown
    assert "version 4: long (rewrites)\n  locks leases ACCESS EXCLUSIVE\n" in shown
    assert "functions and views of release 3 (instant)\n  locks outbox ACCESS EXCLUSIVE, release ACCESS" in shown
    statements = run("--dry-run")
    assert "ALTER TABLE custody.topics ADD COLUMN colour text;" in statements
    steps = json.loads(run("--plan", "--json"))["steps"]
    assert [step["version"] for step in steps] == [2, 3, 4, None]
    assert "an older release: what is new is refused" in run(verb="doctor", release=made.second)
    assert one(old_url, CATALOG) == before
    assert run().startswith("applied 2, 3, 4; the schema is at version 4")
    assert run("--plan") == "There is nothing to do.\n"


HELD = """
import sys, psycopg
from custody.store import migrate
with psycopg.connect(sys.argv[1], application_name="held") as connection:
    migrate.lock(connection)
    migrate._migrate(connection)
    print("migrated", flush=True)
    sys.stdin.readline()
"""
BLOCKED = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"


def test_no_verb_goes_on_with_the_functions_of_another_release(made: Releases, old_url: str) -> None:
    command = [sys.executable, "-c", HELD, old_url]
    pipe = subprocess.PIPE
    found: dict[str, Any] = {}

    def by_sql() -> None:
        with psycopg.connect(old_url, autocommit=True) as mine:
            try:
                mine.execute("SELECT * FROM custody.send('orders', '1')")
            except psycopg.Error as error:
                found["sql"] = (type(error), error.diag.message_detail)
            found["again"] = mine.execute("SELECT * FROM custody.send('orders', '2')").fetchone() is not None

    def by_client() -> None:
        found["client"] = c.publish("orders", 3).offset

    with (
        custody.connect(old_url) as c,
        psycopg.connect(old_url, autocommit=True) as other,
        subprocess.Popen(command, env=environment(made.second), stdin=pipe, stdout=pipe, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "migrated\n"
        threads = [threading.Thread(target=call) for call in (by_sql, by_client)]
        for thread in threads:
            thread.start()
        for part in ("%custody.send(%", "%) ledger, %"):
            wait_for(lambda part=part: other.execute(BLOCKED, [part]).fetchone() == (1,), f"{part} waits")
        process.stdin.write("\n")
        process.stdin.close()
        for thread in threads:
            thread.join(20)
        assert process.wait(20) == 0
        assert found["sql"] in ((psycopg.DatabaseError, "schema_changed"), (psycopg.errors.UndefinedFunction, None))
        assert found["again"]
        assert found["client"] >= 0
        assert len(c.read("orders", 0)) + len(c.read("orders", 1)) == 2, "the refused call left nothing"


def test_a_transaction_that_has_called_a_verb_is_waited_for(made: Releases, old_url: str, release_of: Find) -> None:
    with psycopg.connect(old_url) as mine, psycopg.connect(old_url, autocommit=True) as other:
        mine.execute("SELECT * FROM custody.send('orders', '1')")
        process = migrating(made.second, old_url)
        try:
            wait_for(lambda: other.execute(WAITING).fetchone() == (1,), "the migration waits")
            assert release_of(old_url) == [(1, 1)]
            mine.execute("SELECT * FROM custody.send('orders', '2')")  # it still has the functions that it began with
            mine.commit()
            assert process.communicate(timeout=60)[0] == "[2, 3]\n"
        finally:
            process.kill()
    with custody.connect(old_url) as c:
        assert len(c.read("orders", 0)) + len(c.read("orders", 1)) == 2
