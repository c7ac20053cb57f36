"""A driver that stops at a step of its batch, clears nothing away and goes on as a new epoch: all without a kill.

Processes are really killed at these steps in test_killed_drivers.py and test_killed_writers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from tests.spark import verdict as verdicts
from tests.spark.steps import watch
from tests.spark.verdict import GROUP, ROW, SINK, SOURCE, in_files, in_topic, passed_on, prepare, publish, verdict

import custody
from custody.pipelines import Drive
from custody.spark import Files, Pipeline
from custody.spark.driver.driving import Driving

pytestmark = [pytest.mark.req("S4", "S5"), pytest.mark.timeout(300)]

cloudpickle.register_pickle_by_value(verdicts)  # workers cannot import tests


STEPS = ["uncommitted", "committed", "moved", "returned"]


class Crash(BaseException):
    """What no handler of errors catches."""


class Crashes:
    """Crashes at each of the steps in turn, and lets a batch through before each of them."""

    def __init__(self) -> None:
        self.left, self._may = list(STEPS), False

    def due(self, step: str) -> bool:
        return self._may and self.left[:1] == [step]

    def reached(self, step: str) -> None:
        if self.due(step):
            self._may = False
            raise Crash(self.left.pop(0))
        self._may = self._may or step == "returned"


def fails_of_it(method: Callable[..., None]) -> Callable[..., None]:
    """The call fails where it would not have come back: Spark, and the thread of the pipeline, have to go on."""

    def called(*arguments: Any) -> None:
        try:
            method(*arguments)
        except Crash as crash:
            raise OSError(f"crashed at {crash}") from None

    return called


@pytest.fixture
def live(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the real clock, with the topics and the group."""
    with custody.connect(database_url) as opened:
        prepare(opened)
        yield opened


def test_a_driver_that_crashes_at_every_step_publishes_each_done_message_once(
    live: custody.Custody,
    db: psycopg.Connection[Any],
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crashes = Crashes()
    watch(crashes, monkeypatch.setattr)
    monkeypatch.setattr(Driving, "_batch", fails_of_it(Driving._batch))
    monkeypatch.setattr(Drive, "release", lambda _: 0)  # a killed driver gives nothing back
    publish(live, 0, 60)
    pipeline = Pipeline(source=SOURCE, group=GROUP, sink=[SINK, Files(str(tmp_path / "table"), schema=ROW)])
    pipeline.each(passed_on)
    summary = pipeline.run(live, spark=spark, drain="60s", max_per_batch=10, checkpoint=str(tmp_path / "checkpoint"))
    assert (crashes.left, summary.restarts) == ([], len(STEPS))
    found = verdict(live)
    assert (len(found.done), found.dead, found.open) == (60, {}, 0)
    assert in_files(tmp_path / "table") == in_topic(db)
    assert not [path for path in (tmp_path / "table" / "_custody").rglob("*") if path.is_file()]
    assert db.execute("SELECT count(*) FROM custody.pipeline_writes").fetchone() == (0,)
