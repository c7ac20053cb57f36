"""Every example without Spark runs from nothing, twice: the second time it finds what the first one left.

Those with Spark are run in tests/spark.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.databases import in_memory

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path for path in FOLDER.glob("*.py") if "custody.spark" not in path.read_text("utf-8"))


def run(example: Path, directory: Path) -> str:
    environment = {**os.environ, "CUSTODY_HOME": str(directory / "home")}
    done = subprocess.run(
        [sys.executable, example],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


Said = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def said() -> Said:
    """The lines that an example writes when it runs from nothing. It is run a second time then, and both once only."""

    @cache
    def twice(name: str) -> list[str]:
        with in_memory(f"{name}-") as directory:
            first = run(FOLDER / f"{name}.py", directory)
            run(FOLDER / f"{name}.py", directory)
        return first.splitlines()

    return twice


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=[pytest.mark.chaos] * (path.stem == "outbox_orders")) for path in EXAMPLES],  # it kills
    ids=lambda path: path.stem,
)
def test_an_example_runs(example: Path, said: Said) -> None:
    assert said(example.stem)


@pytest.mark.req("K9")
def test_the_stock_example_never_goes_below_zero_and_delays_no_other_sku(said: Said) -> None:
    lines = said("stock")
    add, remove, other = (
        next(n for n, line in enumerate(lines) if line.strip().startswith(what))
        for what in ("+100 to SKU-123", "-50 to SKU-123", "+10 to SKU-456")
    )
    assert other < add < remove
    assert lines[-1] == "{'SKU-123': 50, 'SKU-456': 10}"


@pytest.mark.chaos
@pytest.mark.req("O1", "V10")
def test_the_books_of_the_outbox_example_balance(said: Said) -> None:
    lines = said("outbox_orders")
    assert lines.count("killed both, and started them again") == 3
    assert lines[-1] == "300 orders of 14405 in all, 300 entries of 14405 in all"


@pytest.mark.req("O1", "X12")
@pytest.mark.parametrize("name", ["fastapi_orders", "flask_orders"])
def test_a_web_application_sends_a_mail_for_each_order_that_was_committed(said: Said, name: str) -> None:
    lines = said(name)
    assert [line for line in lines if line.startswith("order of")] == [
        "order of ann: 201",
        "order of bob: 409",
        "order of cy: 201",
    ]
    assert sorted(line for line in lines if line.startswith("mail to")) == ["mail to ann: 3", "mail to cy: 5"]
    assert lines[-1] == "2 mails were sent, 0 failed"
