"""The demo checks itself: once as a stranger runs it, and then with its evidence spoilt, which it must notice."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from rich.console import Console

import custody
from custody.demo import Plan, run
from custody.demo.verdict import Killed, checks

SMALL = Plan(skus=60, changes=40, poison=2)
# what is done to the evidence, and the check that must then fail; in an order in which none spoils the next
HARMS = {
    "UPDATE demo_stock SET quantity = quantity + 1 WHERE sku = 'SKU-9'": "every SKU has the right stock",
    "INSERT INTO demo_rejected VALUES ('SKU-9', 1, 'below zero')": "CHECK (quantity >= 0) was never violated",
    "DELETE FROM demo_applied WHERE sku = 'SKU-9' AND number = 4;"
    "INSERT INTO demo_applied (sku, number) VALUES ('SKU-9', 4)": "the order of every key was kept",
    "DELETE FROM demo_applied WHERE sku = 'SKU-9' AND number = 4": "nothing is lost or done twice",
    "UPDATE custody.cases SET last_error = 'something' WHERE key = 'SKU-2'": (
        "the change that ended its Python process is dead, and no other for it"
    ),
    "DELETE FROM custody.pipeline_batches": "what the killed driver had claimed was finished by the next one",
    "UPDATE custody.cases SET key = 'SKU-8' WHERE key = 'SKU-3' AND state = 'dead'": (
        "the row that broke a cast is dead, and the rest of its batch went on"
    ),
}


@pytest.mark.req("S8", "K9")
def test_the_demo_ends_with_a_verdict_that_holds_and_notices_what_is_wrong(tmp_path: Path) -> None:
    output = io.StringIO()
    found = run(Console(file=output, width=120), SMALL, home=tmp_path)
    assert all(check.good for check in found), output.getvalue()
    assert "The story of stock-changes/" in output.getvalue()
    assert "✗" not in output.getvalue()
    with custody.connect(home=tmp_path / "home") as c, psycopg.connect(c.database_url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT min(epoch), max(epoch) FROM custody.pipeline_batches JOIN custody.groups g USING (group_id) "
            "WHERE g.name = 'stock'"
        ).fetchone()
        assert row is not None
        taken = connection.execute(
            "SELECT min(claim) FROM custody.pipeline_batches b JOIN custody.groups g USING (group_id) "
            "WHERE g.name = 'stock' AND epoch = %s",
            [row[1]],
        ).fetchone()
        assert taken is not None
        killed = Killed(epoch=row[0], claim=taken[0], messages=0)
        assert failed(c, killed) == set()
        assert failed(c, None) == {"what the killed driver had claimed was finished by the next one"}
        expected: set[str] = set()
        for harm, noticed in HARMS.items():
            connection.execute(harm.encode())
            expected.add(noticed)
            assert expected <= failed(c, killed), noticed
        c.publish("stock-applied", {"sku": "SKU-9", "number": 4, "units": "1"}, key="SKU-9")
        assert "the topic downstream has each done change once" in failed(c, killed)


def failed(c: custody.Custody, killed: Killed | None) -> set[str]:
    return {check.what for check in checks(c, SMALL, killed) if not check.good}


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
    assert "The story of" in done.stderr
