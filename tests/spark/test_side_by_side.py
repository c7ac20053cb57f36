"""Several pipelines in one process: one that fails is marked as failed, and the others go on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from tests.waiting import wait_for

import custody
from custody.errors import PipelineFailed
from custody.spark import Pipeline, PipelineSummary
from custody.spark import running as runs
from custody.spark.driver import settlement
from custody.spark.settings import RunSettings

pytestmark = [pytest.mark.req("S6"), pytest.mark.timeout(300)]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    with custody.connect(database_url, worker="test") as opened:
        for topic in ("bad", "good", "out"):
            opened.create_topic(topic)
        yield opened


def state(c: custody.Custody, topic: str) -> tuple[str, int, str | None]:
    found = c.pipelines(topic, "g")
    return (found[0].state, found[0].tries, found[0].last_error) if found else ("", 0, None)


def test_one_that_fails_does_not_end_the_others(
    c: custody.Custody, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "RESTARTS", 1)
    c.publish("bad", {"n": 1})
    bad = Pipeline(source="bad", group="g", sink="out")
    broken: list[int] = []

    @bad.frame
    def breaks(frame: DataFrame) -> DataFrame:
        if broken:
            raise OSError("the price list is not there")
        return frame

    good = Pipeline(source="good", group="g", sink="out")
    good.each(lambda message: message.payload)
    stop = threading.Event()
    said: list[str] = []
    ended: list[tuple[list[PipelineSummary], list[Exception]]] = []

    def run() -> None:
        settings = RunSettings(stop=stop, on_trouble=said.append)
        ended.append(runs.run_all([bad, good], c, settings, spark=spark))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_for(lambda: state(c, "good")[0] == "running", "the good pipeline does not run", timeout=60)
        broken.append(1)
        c.publish("bad", {"n": 2})
        wait_for(lambda: state(c, "bad")[0] == "failed", lambda: f"{state(c, 'bad')} {said}", timeout=90)
        c.publish("good", {"n": 3})
        wait_for(lambda: c.figures("good", "g").last is not None, "the other does not go on", timeout=60)
        assert state(c, "good")[0] == "running"
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()
    summaries, errors = ended[0]
    assert [summary.error is None for summary in summaries] == [False, True]
    assert [type(error) for error in errors] == [PipelineFailed]
    assert "the price list is not there" in str(errors[0])
    assert "the price list is not there" in (state(c, "bad")[2] or "")
    assert state(c, "good")[0] == "stopped"
    assert any("failed; the other pipelines go on" in line for line in said)


def test_a_listener_that_raises_ends_nothing(c: custody.Custody, spark: SparkSession) -> None:
    for n in range(3):
        c.publish("good", {"n": n})
    good = Pipeline(source="good", group="g", sink="out")
    good.each(lambda message: message.payload)
    called: list[str] = []

    def raises(what: object) -> None:
        called.append(type(what).__name__)
        raise TypeError("the chart is not there")

    summary = good.run(c, spark=spark, available_now=True, max_per_batch=1, on_batch=raises, on_trouble=raises)
    assert (summary.done, summary.restarts) == (3, 0)
    assert called == ["Batch"] * 3, "a batch that was committed is not run again"
