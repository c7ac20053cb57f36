"""A database that fails in the middle of a batch: the batch is run again as a whole, and no message pays for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.waiting import wait_for

import custody
from custody.spark import Pipeline, PipelineSummary
from custody.store import embedded

pytestmark = [pytest.mark.req("S3", "S4"), pytest.mark.chaos, pytest.mark.timeout(300)]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

COUNT = 40


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A server of the test's own."""
    place = tmp_path / "custody"
    with embedded.acquire(place):
        yield place


@pytest.fixture
def c(home: Path) -> Iterator[custody.Custody]:
    with custody.connect(home=home, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        opened.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n % 7}") for n in range(COUNT)])
        yield opened


def pipeline_of(style: str, marks: Path) -> Pipeline:
    """It waits once, in the middle of its batch, until it may go on."""
    policy = custody.Policy(ordering="key", max_attempts=1)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=policy, schema="n int")

    def waits(n: int) -> int:
        if n == 17 and not (marks / "go").exists():
            (marks / "begun").touch()
            while not (marks / "go").exists():
                time.sleep(0.05)
        return n

    if style == "each":
        pipeline.each(lambda message: {"n": waits(message.payload["n"])})
    else:

        @pipeline.frame
        def transform(frame: DataFrame) -> DataFrame:
            return frame.withColumn("n", F.udf(waits, "int", useArrow=False)("n"))

    return pipeline


class Run:
    """A pipeline in a thread."""

    def __init__(self, pipeline: Pipeline, c: custody.Custody, spark: SparkSession) -> None:
        self.said: list[str] = []
        self._summary: list[PipelineSummary] = []
        settings = {"drain": "120s", "batch_time": "10m", "on_trouble": self.said.append}
        self._thread = threading.Thread(target=lambda: self._summary.append(pipeline.run(c, spark=spark, **settings)))
        self._thread.start()

    def ends(self) -> PipelineSummary:
        self._thread.join(200)
        assert self._summary, f"it has not ended: {self.said}"
        return self._summary[0]


def assert_nobody_paid(c: custody.Custody, run: Run) -> None:
    summary = run.ends()
    assert (summary.done, summary.failed, summary.dead) == (COUNT, 0, 0)
    assert not any("running it in parts" in line for line in run.said), run.said
    outputs = sorted(message.payload["n"] for p in range(2) for message in c.read("out", p, max_messages=1000))
    assert outputs == list(range(COUNT))
    with c._db.connection() as connection:
        charged = connection.execute("SELECT count(*) FROM custody.cases").fetchone()
    assert charged == (0,), "an attempt was charged"


@pytest.mark.parametrize("style", ["frame", "each"])
def test_a_database_that_is_down_while_results_are_staged(
    c: custody.Custody, home: Path, spark: SparkSession, tmp_path: Path, style: str
) -> None:
    run = Run(pipeline_of(style, tmp_path), c, spark)
    wait_for((tmp_path / "begun").exists, lambda: f"no batch has begun: {run.said}", timeout=90)
    embedded.stop(home, mode="immediate")
    (tmp_path / "go").touch()
    wait_for(
        lambda: any("retrying the batch" in line for line in run.said), lambda: f"no job failed: {run.said}", timeout=90
    )
    embedded.acquire(home).close()
    assert_nobody_paid(c, run)


def test_a_database_that_was_restarted_meanwhile(
    c: custody.Custody, home: Path, spark: SparkSession, tmp_path: Path
) -> None:
    """The connections that tasks keep are dead, and are not used."""
    run = Run(pipeline_of("frame", tmp_path), c, spark)
    wait_for((tmp_path / "begun").exists, lambda: f"no batch has begun: {run.said}", timeout=90)
    embedded.stop(home, mode="immediate")
    embedded.acquire(home).close()
    (tmp_path / "go").touch()
    assert_nobody_paid(c, run)
