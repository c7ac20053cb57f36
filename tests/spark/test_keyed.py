"""Keyed pipelines on a real Spark: states over batches and failures, and the handlers that are ready to use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from pyspark.sql import SparkSession

import custody
from custody.errors import InvalidArgument, PipelineRefused
from custody.spark import Files, KeyState, Pipeline, PipelineSummary
from custody.spark.keyed import dedup, session

pytestmark = pytest.mark.req("X8")

KEYED = custody.Policy(ordering="key", max_attempts=3, backoff=custody.Constant("20ms"))


@dataclass
class Total:
    sum: int
    seen: int


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        yield opened


def publish(c: custody.Custody, numbers: range, keys: int = 7) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n % keys}") for n in numbers])


def run(pipeline: Pipeline, c: custody.Custody, spark: SparkSession, **settings: Any) -> PipelineSummary:
    return pipeline.run(c, spark=spark, **({"drain": "20s", "batch_time": "10m"} | settings))


def outputs(c: custody.Custody) -> list[Any]:
    return [message.payload for partition in range(2) for message in c.read("out", partition, max_messages=10_000)]


def sums(numbers: range, keys: int = 7) -> dict[str, int]:
    found: Counter[str] = Counter()
    for n in numbers:
        found[f"k{n % keys}"] += n
    return dict(found)


def totals() -> Pipeline:
    """Adds up the numbers of each key. Some fail at their first attempt."""
    pipeline = Pipeline(source="in", group="g", sink="out", policy=KEYED, schema="n int")

    @pipeline.keyed(state=Total)
    def add(message: custody.Message, state: KeyState[Total]) -> object:
        n, before = message.payload["n"], state.get() or Total(0, 0)
        state.update(Total(before.sum + n, before.seen + 1))
        if n % 50 == 13 and message.attempt == 1:
            raise ValueError("not yet")
        return {"key": message.key, "n": n, "sum": before.sum + n, "seen": before.seen + 1}

    return pipeline


def test_states_go_on_over_batches_and_failures(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, range(150))
    first = run(totals(), c, spark, max_per_batch=60)
    publish(c, range(150, 200))
    second = run(totals(), c, spark)
    assert (first.done + second.done, first.failed + second.failed) == (200, 4)
    assert {one.key: one.state["sum"] for one in c.key_states("in", "g")} == sums(range(200))
    running: Counter[str] = Counter()
    for one in outputs(c):
        running[one["key"]] += one["n"]
        assert one["sum"] == running[one["key"]], "each output has the sum of what was done before it"


def test_a_schema_as_in_sql_and_a_sink_outside(c: custody.Custody, spark: SparkSession, tmp_path: Any) -> None:
    publish(c, range(40))
    c.publish("in", {"n": 1})
    folder = tmp_path / "rows"
    pipeline = Pipeline(source="in", group="g", sink=Files(str(folder), schema="total bigint"), policy=KEYED)

    @pipeline.keyed(state="total bigint", ttl="1h")
    def add(message: custody.Message, state: KeyState[dict[str, int]]) -> object:
        before = state.get() or {"total": 0}
        state.update({"total": before["total"] + message.payload["n"]})
        return state.get()

    summary = run(pipeline, c, spark)
    assert (summary.done, summary.dead) == (40, 1)
    assert "has no key" in (c.dead("in", "g")[0].last_error or "")
    stored = c.key_states("in", "g")
    assert {one.key: one.state["total"] for one in stored} == sums(range(40))
    assert all(one.expires_at is not None for one in stored)
    rows = [row["total"] for row in spark.read.parquet(str(folder)).collect()]
    assert len(rows) == 40
    assert max(rows) == max(sums(range(40)).values())


def test_ready_handlers_run_in_executors(c: custody.Custody, spark: SparkSession) -> None:
    for number, at in enumerate([0, 10, 10, 100, 105, 300]):
        c.publish("in", {"id": f"{at}", "at": at, "n": number}, key="a")
    once = Pipeline(source="in", group="once", sink="out", policy=KEYED)
    once.keyed(dedup(by="id", within="1d"))
    summary = run(once, c, spark)
    assert (summary.done, summary.skipped) == (5, 1)
    assert [one["n"] for one in outputs(c)] == [0, 1, 3, 4, 5]
    c.create_topic("sessions")
    clicks = Pipeline(source="out", group="clicks", sink="sessions", policy=KEYED)
    clicks.keyed(session(gap="30s", on="at", aggregate={"clicks": "count", "last": "max(n)"}))
    run(clicks, c, spark)
    found = [message.payload for message in c.read("sessions", 0)]
    assert [(one["clicks"], one["last"]) for one in found] == [(2, 1), (2, 4)], "the last one is still open"


def test_a_trial_shows_what_the_stored_states_give(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, range(10), keys=1)
    run(totals(), c, spark)
    publish(c, range(10, 12), keys=1)
    tried = totals().try_out(c, spark=spark)
    assert [one.outputs[0].payload["sum"] for one in tried] == [55, 66]
    assert [one.state["sum"] for one in c.key_states("in", "g")] == [45], "nothing was stored"


def test_a_group_without_order_by_key_is_refused(c: custody.Custody, spark: SparkSession) -> None:
    pipeline = Pipeline(source="in", group="g")
    pipeline.keyed(state=int)(lambda _message, _state: None)
    with pytest.raises(PipelineRefused, match="has no order by key"):
        run(pipeline, c, spark)
    assert [group.name for group in c.groups("in")] == [], "it was not created"
    c.create_group("in", "g", custody.Policy())
    with pytest.raises(PipelineRefused, match="group 'g' has no order by key"):
        run(pipeline, c, spark)
    wrong = Pipeline(source="in", group="h", policy=KEYED)
    wrong.keyed(state="total many")(lambda _message, _state: None)
    with pytest.raises(InvalidArgument, match="the schema of the state 'total many' is invalid"):
        run(wrong, c, spark)
