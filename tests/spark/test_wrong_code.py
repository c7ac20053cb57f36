"""Code that is wrong for every message: it is the code that stops, uncharged, and not the backlog that dies."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import custody
from custody.errors import PipelineFailed
from custody.spark import Pipeline, PipelineSummary, To

pytestmark = pytest.mark.req("S3")
POLICY = custody.Policy(ordering="key", max_attempts=2, backoff=custody.Constant("10ms"))


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the server's own clock: Spark's processes know no other."""
    with custody.connect(database_url, worker="test") as opened:
        for topic in ("in", "out", "alerts"):
            opened.create_topic(topic)
        yield opened


def publish(c: custody.Custody, count: int) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n % 15}") for n in range(count)])


def pipeline_of(handler: Any) -> Pipeline:
    pipeline = Pipeline(source="in", group="g", sink=["out", "alerts"], policy=POLICY, schema="n int")
    pipeline.each(handler)
    return pipeline


def run(pipeline: Pipeline, c: custody.Custody, spark: SparkSession, **settings: Any) -> PipelineSummary:
    return pipeline.run(c, spark=spark, **({"drain": "20s"} | settings))


@pytest.mark.req("S2")
def test_a_handler_may_yield_its_outputs(c: custody.Custody, spark: SparkSession) -> None:
    def handle(message: custody.Message) -> Iterator[object]:
        n = message.payload["n"]
        if n == 3:
            yield {"n": n}
            raise custody.Dead("in the middle")
        for _ in range(n % 3):
            yield {"n": n}
        if n == 5:
            yield To({"n": n}, topic="alerts")

    publish(c, 12)
    summary = run(pipeline_of(handle), c, spark)
    assert (summary.done, summary.dead) == (11, 1)
    found = sorted(message.payload["n"] for message in c.read("out", 0))
    assert found == sorted(n for n in range(12) for _ in range(n % 3))
    assert [message.payload["n"] for message in c.read("alerts", 0)] == [5]


def undefined(_message: custody.Message) -> object:
    return no_such_name  # type: ignore[name-defined]  # noqa: F821


WRONG = {
    "a name that is not defined": (undefined, "NameError: name 'no_such_name' is not defined .*test_wrong_code.py:"),
    "a tuple": (
        lambda message: (message.payload, 1),
        "the handler returned a tuple; for several outputs return a list",
    ),
    "an unknown topic": (lambda message: To(message.payload, topic="alarts"), "Did you mean 'alerts'"),
    "no topic": (lambda message: To(message.payload, topic=None), r"needs the name of a topic, not None"),
    "any error": (lambda message: {}[message.key], "KeyError: 'k0' "),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_a_handler_that_fails_on_every_message_pauses_its_group_and_charges_nobody(
    c: custody.Custody, spark: SparkSession, what: str
) -> None:
    handler, told = WRONG[what]
    publish(c, 30)
    with pytest.raises(PipelineFailed, match=rf"is paused, because every message since its start fails with .*{told}"):
        run(pipeline_of(handler), c, spark)
    group = c.group("in", "g")
    assert (group.paused_reason or "").startswith("paused by its own pipeline: every message fails with ")
    stats = c.stats("in", "g")
    assert (stats.dead, stats.in_flight) == (0, 0)
    if what == "a name that is not defined":
        summary = run(pipeline_of(lambda message: {"attempt": message.attempt}), c, spark)
        assert (summary.done, summary.failed) == (30, 0), "the next start ends the pause"
        assert {message.payload["attempt"] for message in c.read("out", 0)} == {1}


@pytest.mark.chaos
def test_a_frame_that_fails_on_every_row_is_found_out_soon(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, 20)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=POLICY, schema="n int")

    @pipeline.frame
    def transform(frame: DataFrame) -> DataFrame:
        return frame.withColumn("m", F.udf(lambda n: undefined(n), "int")("n"))

    with pytest.raises(PipelineFailed, match="every message since its start fails with NameError"):
        run(pipeline, c, spark)
    assert c.stats("in", "g").dead == 0


def test_without_the_pause_messages_are_charged(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, 12)
    summary = run(pipeline_of(undefined), c, spark, pause_if_all_fail=False)
    assert (summary.done, summary.dead) == (0, 12)
    assert c.group("in", "g").paused_at is None


class Silent(Exception):
    def __str__(self) -> str:
        return self.args[0]  # type: ignore[no-any-return]


def test_whatever_a_handler_raises_is_charged_to_its_message(c: custody.Custody, spark: SparkSession) -> None:
    def handle(message: custody.Message) -> object:
        if message.payload["n"] == 3:
            raise asyncio.CancelledError  # no Exception, as are the panics of code in Rust
        if message.payload["n"] == 4:
            raise Silent  # whose text raises another error
        return message.payload

    publish(c, 12)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    tried = {trial.message.payload["n"]: trial.outcome for trial in pipeline_of(handle).try_out(c, spark=spark)}
    assert tried == {n: "nack" if n in (3, 4) else "ack" for n in range(12)}
    summary = run(pipeline_of(handle), c, spark)
    assert (summary.done, summary.dead, summary.restarts) == (10, 2, 0)
    assert sorted((letter.last_error or "").partition(" ")[0] for letter in c.dead("in", "g")) == [
        "CancelledError",
        "Silent:",
    ]
