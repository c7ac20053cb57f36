"""Drivers that are killed while they write tables: each done message is in the table once, and no other is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable
from psycopg.rows import dict_row
from tests.spark.drivers import Drivers
from tests.spark.verdict import NAMES, in_topic, prepare, publish, verdict

import custody
from custody.spark import Iceberg

pytestmark = [pytest.mark.req("X9", "S4"), pytest.mark.chaos, pytest.mark.timeout(900)]

STEPS = ["written", "uncommitted", "committed", "shown", "returned", "written java", "committed python"]
"""Written: the rows are staged, and in a transaction that is open. Shown: they are in the table."""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    started = Drivers(tmp_path_factory.mktemp("drivers"))
    try:
        yield started
    finally:
        started.close()


def rows(kind: str, place: str, database: str) -> Counter[str]:
    """The rows of the table, as anybody reads it."""
    if kind == "jdbc":
        with psycopg.connect(place, row_factory=dict_row) as db:
            found: list[dict[str, Any]] = db.execute("SELECT * FROM rows").fetchall()
    elif kind == "delta":
        found = DeltaTable(place).to_pyarrow_dataset().to_table().to_pylist()
    else:
        with Iceberg("shop.rows", warehouse=place).catalog(database) as catalog:
            found = catalog.load_table("shop.rows").scan().to_arrow().to_pylist()
    return Counter(json.dumps({name: row[name] for name in NAMES}) for row in found)


@pytest.mark.parametrize("kind", ["jdbc", "delta", "iceberg"])
@pytest.mark.parametrize("steps", [["committed"], pytest.param(STEPS, marks=pytest.mark.long, id="every step")])
def test_a_table_has_each_done_message_once(
    database_url: str, db: psycopg.Connection[Any], bare_url: str, drivers: Drivers, tmp_path: Path, kind: str,
    steps: list[str],
) -> None:  # fmt: skip
    place = bare_url if kind == "jdbc" else str(tmp_path / "table")
    if kind == "jdbc":
        with psycopg.connect(bare_url, autocommit=True) as shop:
            shop.execute('CREATE TABLE rows (partition int, "offset" bigint, seq int, part int)')
    with custody.connect(database_url) as c:
        prepare(c)
        for number, step in enumerate(steps):
            publish(c, 800 * number, 800)
            where, _, victim = step.partition(" ")
            driver = drivers.take()
            driver.run(
                database_url, (where, 1 + number % 2, f"kill {victim}".strip()), table=(kind, place), max_per_batch=400
            )
            driver.dies()
        last = drivers.take(more=False)
        last.run(database_url, table=(kind, place))
        last.finishes()
        found = verdict(c)
    assert found.open == 0
    assert found.dead
    assert rows(kind, place, database_url) == in_topic(db)
    assert db.execute("SELECT count(*) FROM custody.pipeline_writes").fetchone() == (0,)
