"""custody doctor and migrate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.cli.conftest import Run
from tests.conftest import Clock

from custody import Custody, Policy
from custody.spark.environment import java
from custody.store import databases, embedded


def checks(document: dict[str, list[dict[str, str]]]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in document["checks"]}


def test_a_healthy_database_with_unsafe_settings(quick: Run, explained) -> None:
    document = quick("doctor", "--json").document
    explained(document)
    found = checks(document)
    assert document["healthy"]
    assert found["database"]["status"] == found["postgresql"]["status"] == found["schema"]["status"] == "ok"
    assert (found["java"]["status"], found["java"]["message"]) == ("info", java.found())
    assert set(found) >= {"fsync", "full_page_writes", "synchronous_commit"}
    assert document["groups"] == []
    text = quick("doctor").out
    assert f"{found['fsync']['status']:<4}  fsync" in text


def test_what_the_server_is_asked(c: Custody, db: psycopg.Connection) -> None:
    server = c.server()
    assert server.version_num >= 150000
    (fsync,) = db.execute("SHOW fsync").fetchone() or ("",)
    assert server.fsync == (fsync == "on")
    assert server.old_transactions == ()
    with psycopg.connect(c.database_url, application_name="forgotten") as idle:
        idle.execute("SELECT 1")
        assert db.execute("SELECT kind, who FROM custody.old_transactions('0 s')").fetchall() == [
            ("idle in transaction", "forgotten")
        ]


@pytest.mark.req("N5")
def test_a_visibility_timeout_is_recommended(c: Custody, clock: Clock, quick: Run) -> None:
    c.create_topic("orders")
    c.create_group("orders", "quick", Policy())
    c.create_group("orders", "slow", Policy(visibility_timeout="1m"))
    c.publish_many("orders", list(range(200)))
    for group, took in (("quick", 0.01), ("slow", 25.0)):
        for _ in range(100):
            lease = c.claim("orders", group)
            clock.move(took)
            lease.ack()
    document = quick("doctor", "--json").document
    quick, slow = document["groups"]
    assert (quick["leases"], quick["p50"], quick["recommended_visibility_timeout"]) == (100, 0.01, 30.0)
    assert (slow["p99"], slow["visibility_timeout"], slow["recommended_visibility_timeout"]) == (25.0, 60.0, 75.0)
    found = checks(document)
    assert found["orders/slow"]["remedy"] == "custody groups update orders slow --visibility-timeout 75s"
    assert "orders/quick" not in found


@pytest.mark.req("N5")
def test_leases_that_expire_under_a_live_worker_are_named(c: Custody, clock: Clock, quick: Run) -> None:
    c.create_topic("orders")
    c.create_group("orders", "stock", Policy(visibility_timeout="5s"))
    c.publish_many("orders", list(range(20)))
    c.claim("orders", "stock", max_messages=10)
    clock.move(6)
    assert c.handling_times("orders", "stock")[0].expired == 0  # nobody has noticed yet
    c.claim("orders", "stock")
    clock.move(1)
    assert c.handling_times("orders", "stock")[0].expired_alive == 0
    c.claim("orders", "stock").ack()
    (times,) = c.handling_times()
    assert (times.expired, times.expired_alive) == (1, 1)
    warning = checks(quick("doctor", "--json").document)["orders/stock"]
    assert warning["message"] == "1 lease expired in the last hour, 1 of them while their worker was alive"
    clock.move(3601)
    assert c.handling_times()[0].expired == 0


@pytest.fixture
def empty_database(server_url: str, database_url: str) -> Iterator[str]:
    """A database without Custody's schema."""
    name = f"{database_url.rsplit('/', 1)[-1].split('?')[0]}_empty"
    yield databases.create(server_url, name)
    databases.drop(server_url, name)


def test_the_doctor_changes_nothing_and_migrate_does(quick: Run, empty_database: str) -> None:
    sick = quick("doctor", "--json", "--database", empty_database, code=1).document
    assert not sick["healthy"]
    assert checks(sick)["schema"]["status"] == "fail"
    with psycopg.connect(empty_database) as connection:
        assert connection.execute("SELECT to_regnamespace('custody')").fetchone() == (None,)

    done = quick("migrate", "--json", "--database", empty_database).document
    assert done == {"applied": list(range(1, done["schema_version"] + 1)), "schema_version": done["schema_version"]}
    again = quick("migrate", "--database", empty_database)
    assert again.out == f"the schema is at version {done['schema_version']}\n"
    assert quick("doctor", "--json", "--database", empty_database).document["healthy"]


def test_the_doctor_makes_no_embedded_database_and_migrates_none(quick: Run, base: Path) -> None:
    home = base / "home"
    arguments = ["doctor", "--json", "--home", str(home)]
    found = quick(*arguments).document
    assert (found["healthy"], checks(found)["database"]["message"]) == (True, "no database yet")
    assert not home.exists()
    with embedded.acquire(home, settings={"fsync": "off"}) as server:
        assert checks(quick(*arguments).document)["schema"]["status"] == "info"
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT to_regnamespace('custody')").fetchone() == (None,)
        quick("topics", "list", "--home", str(home))
        assert checks(quick(*arguments).document)["schema"]["status"] == "ok"


def test_an_older_schema_is_named_by_every_command(quick: Run, live: Custody, db: psycopg.Connection) -> None:
    db.execute("UPDATE custody.release SET digest = 'other'")
    assert quick("topics", "list", "--json", code=1).error["code"] == "schema_older"
    assert checks(quick("doctor", "--json", code=1).document)["schema"]["status"] == "fail"
    quick("migrate")
    quick("topics", "list")


def test_a_database_that_is_not_there(quick: Run) -> None:
    sick = quick("doctor", "--json", "--database", "postgresql://nobody@127.0.0.1:1/none", code=1).document
    assert checks(sick)["database"]["status"] == "fail"
    assert "fail  database" in quick("doctor", "--database", "postgresql://nobody@127.0.0.1:1/none", code=1).out


def test_a_plan_and_a_dry_run_change_nothing(quick: Run, explained, empty_database: str) -> None:
    for options in (["--plan"], ["--dry-run"]):
        found = quick("migrate", *options, "--json", "--database", empty_database).document
        explained(found)
        assert [step["name"] for step in found["steps"]] == ["all tables", "functions and views of release 1"]
        assert {step["takes"] for step in found["steps"]} == {"instant"}
        with psycopg.connect(empty_database) as connection:
            assert connection.execute("SELECT to_regnamespace('custody')").fetchone() == (None,)
    quick("migrate", "--database", empty_database)
    assert quick("migrate", "--plan", "--database", empty_database).out == "There is nothing to do.\n"
    assert "cannot be combined" in quick("migrate", "--plan", "--dry-run", code=2).err


def test_a_plan_of_an_embedded_database_makes_none(quick: Run, base: Path) -> None:
    assert quick("migrate", "--plan", "--home", str(base / "home")).out == "There is nothing to do.\n"
    assert not (base / "home").exists()


def test_a_schema_of_a_newer_release_that_serves_this_one_is_healthy(
    quick: Run, live: Custody, db: psycopg.Connection
) -> None:
    db.execute("UPDATE custody.release SET release = release + 1, digest = 'another'")
    schema = checks(quick("doctor", "--json").document)["schema"]
    assert (schema["status"], schema["message"]) == ("ok", "version 1, of a newer release that serves this one")
    assert quick("migrate", "--json", code=1).error["code"] == "schema_newer"
    db.execute("UPDATE custody.release SET release = release - 1")
