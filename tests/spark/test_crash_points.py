"""A driver that stops at a step of its batch, clears nothing away and goes on as a new epoch: all without a kill.

Processes are really killed at these steps in test_killed_drivers.py and test_killed_writers.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from tests.spark import verdict as verdicts
from tests.spark.steps import Steps, watch
from tests.spark.verdict import (
    GROUP,
    ROW,
    SINK,
    SOURCE,
    assert_states_are_sums,
    in_files,
    in_topic,
    passed_on,
    policy,
    prepare,
    publish,
    summed,
    verdict,
)
from tests.waiting import wait_for

import custody
from custody.errors import PipelineFenced
from custody.spark import Files, Pipeline, PipelineSummary
from custody.spark.driver.driving import Driving
from custody.verbs.pipelines import DriverVerbs

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
        prepare(opened, policy(visibility_timeout="60s"))  # a lease that runs out on a busy machine is another story
        yield opened


@pytest.mark.chaos
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
    monkeypatch.setattr(DriverVerbs, "release", lambda _: 0)  # a killed driver gives nothing back
    publish(live, 0, 1000)
    pipeline = Pipeline(source=SOURCE, group=GROUP, sink=[SINK, Files(str(tmp_path / "table"), schema=ROW)])
    pipeline.each(passed_on)
    summary = pipeline.run(live, spark=spark, drain="60s", max_per_batch=100, checkpoint=str(tmp_path / "checkpoint"))
    assert (crashes.left, summary.restarts) == ([], len(STEPS))
    found = verdict(live)
    assert (len(found.done), found.dead, found.open) == (1000, {}, 0)
    (places,) = db.execute("SELECT last_value FROM custody.stage_places").fetchone() or (0,)
    assert places > 20, "tasks have written no rows of the log"
    assert in_files(tmp_path / "table") == in_topic(db)
    assert not [path for path in (tmp_path / "table" / "_custody").rglob("*") if path.is_file()]
    assert db.execute("SELECT count(*) FROM custody.pipeline_writes").fetchone() == (0,)


@pytest.mark.chaos
@pytest.mark.req("X8")
def test_a_driver_that_crashes_at_every_step_applies_each_done_message_once(
    live: custody.Custody, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes = Crashes()
    crashes.left = ["staged", "uncommitted", "committed", "returned"]
    watch(crashes, monkeypatch.setattr)
    monkeypatch.setattr(Driving, "_batch", fails_of_it(Driving._batch))
    monkeypatch.setattr(DriverVerbs, "release", lambda _: 0)
    publish(live, 0, 60)
    pipeline = Pipeline(source=SOURCE, group=GROUP, sink=SINK)
    pipeline.keyed(state=int)(summed)
    summary = pipeline.run(live, spark=spark, drain="60s", max_per_batch=10, checkpoint=str(tmp_path / "checkpoint"))
    assert (crashes.left, summary.restarts) == ([], 4)
    assert len(verdict(live).done) == 60
    assert_states_are_sums(live)


def test_an_older_driver_is_fenced(live: custody.Custody, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the results of its second batch while a newer one takes over."""
    held, go_on, stop = threading.Event(), threading.Event(), threading.Event()

    def wait(_step: str, _deed: str) -> None:
        held.set()
        assert go_on.wait(120), "nobody lets the older driver go on"

    watch(Steps([("staged", 2, "wait")], wait), monkeypatch.setattr)
    publish(live, 0, 60)
    claims: dict[str, list[int]] = {"older": [], "newer": []}
    errors: list[Exception] = []

    def drive(name: str, **how: Any) -> PipelineSummary:
        pipeline = Pipeline(source=SOURCE, group=GROUP, sink=SINK)
        pipeline.each(passed_on)
        tell = claims[name].append
        return pipeline.run(live, spark=spark, max_per_batch=20, on_batch=lambda batch: tell(batch.claim), **how)

    def older() -> None:
        try:
            drive("older", stop=stop)
        except PipelineFenced as fenced:
            errors.append(fenced)

    thread = threading.Thread(target=older)
    thread.start()
    try:
        wait_for(held.is_set, "the older driver has no second batch", timeout=90)
        summary = drive("newer", drain="60s")
    finally:
        go_on.set()
        thread.join(60)
        stop.set()  # if it was not fenced: with a driver that goes on, the JVM of the session could not be ended
        thread.join(60)
    assert "epoch" in str(errors[0])
    assert (len(claims["older"]), summary.done) == (1, 40)
    assert set(claims["older"]).isdisjoint(claims["newer"])
    found = verdict(live)
    assert (len(found.done), found.dead, found.open) == (60, {}, 0)
    assert found.stages <= 1
