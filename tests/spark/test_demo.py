"""The demo checks itself: its evidence is spoilt, which it must notice; and it runs as a stranger runs it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession
from rich.console import Console
from tests.spark.steps import Steps, watch

import custody
from custody.demo import show, stock
from custody.demo.plan import Plan
from custody.demo.show import run
from custody.demo.verdict import Killed, checks
from custody.verbs.pipelines import DriverVerbs

# what is done to the evidence, and the check that must then fail; in an order in which none spoils the next
HARMS = {
    "UPDATE demo_stock SET quantity = quantity + 1 WHERE sku = 'SKU-9'": "every SKU has the right stock",
    "INSERT INTO demo_rejected VALUES ('SKU-9', 1, 'below zero')": "CHECK (quantity >= 0) was never violated",
    "DELETE FROM demo_applied WHERE sku = 'SKU-9' AND number = 4;"
    "INSERT INTO demo_applied (sku, number) VALUES ('SKU-9', 4)": "the order of every key was kept",
    "DELETE FROM demo_applied WHERE sku = 'SKU-9' AND number = 4": "nothing is lost or done twice",
    "UPDATE custody.cases SET last_error = 'something' WHERE key = 'SKU-2'": (
        "the change that ended its Python process is dead, and no other because of it"
    ),
    "DELETE FROM custody.pipeline_batches": "the next driver finished the claim of the killed one",
    "UPDATE custody.cases SET key = 'SKU-8' WHERE key = 'SKU-3' AND state = 'dead'": (
        "the row that broke a cast is dead, and the rest of its batch went on"
    ),
}


@pytest.mark.chaos
@pytest.mark.req("S8", "K9")
def test_the_verdict_notices_what_is_wrong(
    database_url: str, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the pipelines of the demo in this process, whose driver fails in the middle of its second batch."""

    def fail(step: str, _: str) -> None:
        raise OSError(f"the driver fails, and its claim is {step}")

    watch(Steps([("logged", 2, "fail")], fail), monkeypatch.setattr)
    monkeypatch.setattr(DriverVerbs, "release", lambda _: 0)  # a killed driver gives nothing back
    plan = Plan(skus=10, changes=6, poison=2)
    with custody.connect(database_url) as c, psycopg.connect(database_url, autocommit=True) as connection:
        show.publish(c, plan)
        for pipeline in stock.pipelines(database_url):
            pipeline.run(c, spark=spark, drain="60s", max_per_batch=30)
        first, last = epochs(connection)
        taken = connection.execute(
            "SELECT min(claim) FROM custody.pipeline_batches b JOIN custody.groups g USING (group_id) "
            "WHERE g.name = 'stock' AND epoch = %s",
            [last],
        ).fetchone()
        assert taken is not None
        killed = Killed(epoch=first, claim=taken[0], messages=0)
        assert failed(c, plan, killed) == set()
        assert failed(c, plan, None) == {"the next driver finished the claim of the killed one"}
        expected: set[str] = set()
        for harm, noticed in HARMS.items():
            connection.execute(harm.encode())
            expected.add(noticed)
            assert expected <= failed(c, plan, killed), noticed
        c.publish("stock-applied", {"sku": "SKU-9", "number": 4, "units": "1"}, key="SKU-9")
        assert "the topic downstream has each done change once" in failed(c, plan, killed)


def epochs(connection: psycopg.Connection) -> tuple[int, int]:
    """The first and the last that committed a batch of stock changes."""
    row = connection.execute(
        "SELECT min(epoch), max(epoch) FROM custody.pipeline_batches JOIN custody.groups g USING (group_id) "
        "WHERE g.name = 'stock'"
    ).fetchone()
    assert row is not None
    return row


def failed(c: custody.Custody, plan: Plan, killed: Killed | None) -> set[str]:
    return {check.what for check in checks(c, plan, killed) if not check.good}


@pytest.mark.chaos
@pytest.mark.req("S8", "K9")
def test_the_demo_kills_a_driver_and_ends_with_a_verdict_that_holds(tmp_path: Path) -> None:
    output = io.StringIO()
    found = run(Console(file=output, width=120), Plan(skus=60, changes=40, poison=2), home=tmp_path)
    assert all(check.good for check in found), output.getvalue()
    assert "History of stock-changes/" in output.getvalue()
    assert "✗" not in output.getvalue()
    with custody.connect(home=tmp_path / "home") as c, psycopg.connect(c.database_url, autocommit=True) as connection:
        first, last = epochs(connection)
    assert first < last


@pytest.mark.slow
@pytest.mark.req("S8")
def test_the_command_runs_the_demo_from_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "custody", "demo", "--json"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["good"]
    assert len(verdict["checks"]) == 8
    assert "History of" in done.stderr
