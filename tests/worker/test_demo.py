"""The demo checks itself; here it is made to lie and must notice."""

from __future__ import annotations

import io
from collections.abc import Callable

import psycopg
import pytest
from rich.console import Console

import custody
from custody.claim import Lease
from custody.demo import show
from custody.demo.show import Plan
from custody.model import Settled

SMALL = Plan(skus=40, changes=10, poison=2)
TAKEN_OVER = "the killed worker's messages were taken over"
# what is done to the evidence, and the check that must then fail; in an order in which none spoils the next
HARMS = {
    "UPDATE demo_stock SET quantity = quantity + 1 WHERE sku = 'SKU-9'": "every SKU has the right stock",
    "INSERT INTO demo_rejected VALUES ('SKU-9', 1, 'below zero')": "CHECK (quantity >= 0) was never violated",
    "DELETE FROM demo_applied WHERE sku = 'SKU-9' AND number = 4;"
    "INSERT INTO demo_applied (sku, number) VALUES ('SKU-9', 4)": "the order of every key was kept",
    "DELETE FROM custody.journal WHERE kind = 'claim' AND entry > ("
    "SELECT min(entry) FROM custody.journal WHERE kind = 'expire' AND worker <> 'operator')": TAKEN_OVER,
    "DELETE FROM demo_applied WHERE sku = 'SKU-9' AND number = 4": "nothing is lost or done twice",
}


@pytest.mark.req("K9")
def test_the_demo_ends_with_a_verdict_that_holds() -> None:
    output = io.StringIO()
    checks = show.run(Console(file=output, width=120), SMALL)
    assert all(check.good for check in checks), output.getvalue()
    text = output.getvalue()
    assert "390 done + 2 dead + 8 held behind them = 400 published" in text
    assert "The story of stock-changes/" in text
    assert "✗" not in text


def failed(checks: list[show.Check]) -> set[str]:
    return {check.what for check in checks if not check.good}


def test_the_verdict_notices_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """One run whose evidence is spoilt step by step: each step fails one more check."""
    check: Callable[..., list[show.Check]] = show._checks

    def spoil(c: custody.Custody, plan: Plan, killed: str | None, late: str) -> list[show.Check]:
        expected = {"a late ack was refused"}
        assert failed(check(c, plan, killed, late)) == expected
        assert failed(check(c, plan, None, late)) == {*expected, TAKEN_OVER}, "nobody was killed"
        assert failed(check(c, plan, "another:1", late)) == {*expected, TAKEN_OVER}, "it held nothing"
        with psycopg.connect(c.database_url, autocommit=True) as connection:
            for harm, noticed in HARMS.items():
                connection.execute(harm.encode())
                expected.add(noticed)
                assert expected <= failed(check(c, plan, killed, late)), noticed
        return check(c, plan, killed, late)

    monkeypatch.setattr(show, "_checks", spoil)
    monkeypatch.setattr(Lease, "ack", lambda self: Settled(settled=len(self)))  # what was late is accepted
    output = io.StringIO()
    found = show.run(Console(file=output, width=120), Plan(skus=20, changes=10, poison=1))
    assert failed(found) == {check.what for check in found}, output.getvalue()
    assert sum("✗" in line for line in output.getvalue().splitlines()) == len(found) == 6
