"""The examples that use Spark run from nothing, and a second time, in the session that all Spark tests share."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from custody.store import embedded

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "fraud_screening": ["1980 screened, 20 dead, 1980 published", "an amount of -1.0 is no payment"],
    "fraud_scoring": ["1980 scored, 20 dead, 8 blocked", "expectation 'an amount above zero' is not met"],
    "enrichment": ["198 priced, 2 dead", "no price for gold", "an order of nothing"],
    "iceberg_orders": ["99 written, 1 dead", "99 rows of 20 customers"],
    "stock_pipeline": ["80 changes in order, 40 failures on the way, 0 SKUs not at zero"],
    "structured_streaming": ["/0: 100 views", "/1: 100 views", "/2: 100 views"],
    "sessions": ["120 clicks, 12 duplicates, 20 visits", "10 visitors have an open visit"],
    "dead_letters": ["5 × a.example: mailbox full", "5 × b.example: mailbox full"],
}

COSTLY = ("enrichment", "fraud_screening", "iceberg_orders", "stock_pipeline", "structured_streaming")
"""These run with the kills, which have more time."""


@pytest.mark.req("S2")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.chaos] * (name in COSTLY)) for name in SAYS])
def test_an_example_runs_and_says_what_it_should(
    name: str,
    spark: SparkSession,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CUSTODY_HOME", str(base / "home"))
    monkeypatch.delenv("CUSTODY_DATABASE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    with embedded.acquire(base / "home", settings={"fsync": "off"}):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        said = capsys.readouterr().out
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")  # it finds what the first run left
    for line in SAYS[name]:
        assert line in said
    assert capsys.readouterr().out


def test_every_example_with_spark_is_run_here() -> None:
    with_spark = {path.stem for path in EXAMPLES.glob("*.py") if "custody.spark" in path.read_text("utf-8")}
    assert with_spark == set(SAYS)
