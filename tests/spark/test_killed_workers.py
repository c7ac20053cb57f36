"""What a killed process leaves behind: handlers that end theirs, attempts that staged and died, half a checkpoint."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from tests.spark import verdict as verdicts
from tests.spark.verdict import GROUP, SINK, SOURCE, passed_on, policy, prepare, publish, verdict

import custody
from custody.spark import Pipeline
from custody.spark.tasks.each import KILLED, Attempt

pytestmark = [pytest.mark.req("S3", "S4"), pytest.mark.timeout(600)]

for module in (sys.modules[__name__], verdicts):
    cloudpickle.register_pickle_by_value(module)  # workers cannot import tests


@pytest.fixture
def live(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the real clock."""
    with custody.connect(database_url) as opened:
        yield opened


def happens(marks: Path, name: str, times: int) -> bool:
    """True for the first so many calls, in whatever process."""
    for n in range(times):
        try:
            (marks / f"{name}-{n}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return True
    return False


@pytest.mark.chaos
def test_what_a_dead_attempt_staged_is_not_published(
    live: custody.Custody, db: psycopg.Connection, spark: SparkSession, tmp_path: Path
) -> None:
    """As with the slower of two speculative attempts: its rows are in the stage, and no commit names them."""
    prepare(live)
    publish(live, 0, 2000)
    pipeline = Pipeline(source=SOURCE, group=GROUP, sink=SINK)
    finish = Attempt.finish

    @pipeline.each
    def dies_at_the_end(message: custody.Message) -> object:
        def and_die(attempt: Attempt) -> NoReturn:
            finish(attempt)
            os._exit(1)

        if message.offset == 7 and happens(tmp_path, f"partition {message.partition}", 2):
            Attempt.finish = and_die  # type: ignore[method-assign]
        return passed_on(message)

    staged = []
    pipeline.run(
        live,
        spark=spark,
        drain="60s",
        max_per_batch=1000,
        on_batch=lambda batch: staged.append(batch.committed.outputs),
    )
    assert len(list(tmp_path.iterdir())) == 4, "no attempt died"
    found = verdict(live)
    assert (len(found.done), found.dead, found.open, found.stages) == (2000, {}, 0, 0)
    assert sum(staged) == found.outputs == 4000


def test_a_checkpoint_that_spark_refuses_is_done_without(
    live: custody.Custody, spark: SparkSession, tmp_path: Path
) -> None:
    """A driver that is killed while Spark writes the first file of its log leaves a part of it there."""
    prepare(live)
    publish(live, 0, 100)
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / ".0.half.tmp").touch()
    pipeline = Pipeline(source=SOURCE, group=GROUP, sink=SINK)
    pipeline.each(passed_on)
    summary = pipeline.run(live, spark=spark, drain="60s", checkpoint=str(tmp_path))
    assert (summary.restarts, summary.done) == (1, 100)
    assert verdict(live).open == 0


@pytest.mark.chaos
@pytest.mark.parametrize("killers", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_message_that_kills_its_worker_goes_dead_alone(
    live: custody.Custody, spark: SparkSession, tmp_path: Path, killers: int
) -> None:
    prepare(live, policy(max_attempts=2))
    publish(live, 0, 2000)
    bad = {f"key {n}" for n in range(killers)}
    pipeline = Pipeline(source=SOURCE, group=GROUP, sink=SINK)

    @pipeline.each
    def crashes(message: custody.Message) -> object:
        if message.key in bad and message.payload["seq"] == 4:
            os._exit(3)
        return passed_on(message)

    pipeline.run(live, spark=spark, drain="120s", max_per_batch=1000)
    found = verdict(live)
    assert (found.open, found.stages) == (0, 0)
    assert list(found.dead.values()) == [KILLED] * killers
    assert len(found.done) == 2000 - killers, "the later messages of its key go on when it is dead"
    letters = live.dead(SOURCE, GROUP)
    assert {letter.key for letter in letters} == bad
    assert {letter.payload["seq"] for letter in letters} == {4}


@pytest.mark.chaos
def test_a_message_that_kills_its_worker_once_is_charged_once(
    live: custody.Custody, spark: SparkSession, tmp_path: Path
) -> None:
    prepare(live)
    publish(live, 0, 2000)
    pipeline = Pipeline(source=SOURCE, group=GROUP, sink=SINK)

    @pipeline.each
    def crashes_at_first(message: custody.Message) -> object:
        if message.key == "key 3" and message.payload["seq"] == 4 and happens(tmp_path, "crash", 2):
            os._exit(3)
        return passed_on(message)

    summary = pipeline.run(live, spark=spark, drain="60s", max_per_batch=1000)
    found = verdict(live)
    assert (len(found.done), found.dead, found.open, found.stages) == (2000, {}, 0, 0)
    # two died: the first without a note, the second in a block of many, of which each was then noted and went well
    assert summary.failed == 0
