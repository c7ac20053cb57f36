"""Drivers that are killed while they write files: each done message is in the table once, and no other is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.spark.drivers import Drivers
from tests.spark.verdict import in_files, in_topic, prepare, publish, verdict

import custody

pytestmark = [pytest.mark.req("S4", "S5"), pytest.mark.chaos, pytest.mark.timeout(600)]

STEPS = ["written", "uncommitted", "committed", "moved", "shown", "returned", "written java", "moved python"]
"""Written: the files are staged. Moved: one of them is shown, and the others are not."""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drivers]:
    started = Drivers(tmp_path_factory.mktemp("drivers"))
    try:
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("steps", [["moved"], pytest.param(STEPS, marks=pytest.mark.long, id="every step")])
def test_files_have_each_done_message_once(
    database_url: str, db: psycopg.Connection[Any], drivers: Drivers, tmp_path: Path, steps: list[str]
) -> None:
    table = tmp_path / "table"
    with custody.connect(database_url) as c:
        prepare(c)
        for number, step in enumerate(steps):
            publish(c, 800 * number, 800)
            where, _, victim = step.partition(" ")
            driver = drivers.take()
            deed = f"kill {victim}".strip()
            driver.run(database_url, (where, 1 + number % 2, deed), files=table, max_per_batch=400)
            driver.dies()
        last = drivers.take(more=False)
        last.run(database_url, files=table)
        last.finishes()
        found = verdict(c)
    assert found.open == 0
    assert found.dead
    assert in_files(table) == in_topic(db)
    assert not [path for path in (table / "_custody").rglob("*") if path.is_file()], "nothing stays staged"
    assert db.execute("SELECT count(*) FROM custody.pipeline_writes").fetchone() == (0,)
