"""The demo checks itself; here it is made to lie and must notice."""

from __future__ import annotations

import io
from collections.abc import Callable

import psycopg
import pytest
from rich.console import Console

import custody
from custody.demo import show
from custody.demo.show import Plan

SMALL = Plan(skus=40, changes=10, poison=2)


@pytest.mark.req("K9")
def test_the_demo_ends_with_a_verdict_that_holds() -> None:
    output = io.StringIO()
    checks = show.run(Console(file=output, width=120), SMALL)
    assert all(check.good for check in checks), output.getvalue()
    text = output.getvalue()
    assert "390 done + 2 dead + 8 held behind them = 400 published" in text
    assert "The story of stock-changes/" in text
    assert "✗" not in text


@pytest.mark.parametrize(
    ("harm", "noticed"),
    [
        ("DELETE FROM demo_applied WHERE sku = 'SKU-9' AND number = 4", "nothing is lost"),
        ("UPDATE demo_stock SET quantity = quantity + 1 WHERE sku = 'SKU-9'", "right stock"),
        ("INSERT INTO demo_rejected VALUES ('SKU-9', 1, 'below zero')", "never violated"),
    ],
)
def test_the_verdict_notices_what_is_wrong(harm: str, noticed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: Callable[..., list[show.Check]] = show._checks

    def after_harm(c: custody.Custody, *rest: object) -> list[show.Check]:
        with psycopg.connect(c.database_url, autocommit=True) as connection:
            connection.execute(harm.encode())
        return checks(c, *rest)

    monkeypatch.setattr(show, "_checks", after_harm)
    output = io.StringIO()
    found = show.run(Console(file=output, width=120), Plan(skus=20, changes=10, poison=1))
    assert any(noticed in check.what and not check.good for check in found), output.getvalue()
    assert any("✗" in line and noticed in line for line in output.getvalue().splitlines()), output.getvalue()
