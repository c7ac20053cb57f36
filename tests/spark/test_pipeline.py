"""Pipelines on a real Spark: one message in, none, one or many out; policies; typed fields; what a bad row costs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQueryListener
from tests.waiting import wait_for

import custody
from custody.errors import PipelineRefused, TopicNotFound
from custody.spark import Batch, Pipeline, PipelineSummary, To, fail_when, skip_when
from custody.spark.tasks.each import KILLED

ONCE = custody.Policy(ordering="key", max_attempts=1)
ORDERED = custody.Policy(ordering="key", max_attempts=2, backoff=custody.Constant("20ms"))


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the server's own clock: Spark's processes know no other."""
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        yield opened


def publish(c: custody.Custody, payloads: list[Any], keys: int = 7) -> None:
    c.publish_many("in", [custody.Outgoing(payload, key=f"k{n % keys}") for n, payload in enumerate(payloads)])


def published(c: custody.Custody, topic: str = "out") -> list[custody.Message]:
    count = c.topic(topic).partitions
    return [message for p in range(count) for message in c.read(topic, p, max_messages=10_000)]


def numbers(c: custody.Custody, topic: str = "out") -> list[int]:
    return sorted(message.payload["n"] for message in published(c, topic))


def run(pipeline: Pipeline, c: custody.Custody, spark: SparkSession, **settings: Any) -> PipelineSummary:
    return pipeline.run(c, spark=spark, **({"drain": "20s", "batch_time": "10m"} | settings))


def assert_in_key_order(c: custody.Custody, topic: str = "out") -> None:
    last: dict[str | None, int] = {}
    for message in published(c, topic):
        assert message.payload["n"] > last.get(message.key, -1)
        last[message.key] = message.payload["n"]


@pytest.mark.req("S2")
def test_none_one_or_many_outputs_to_one_or_several_topics(c: custody.Custody, spark: SparkSession) -> None:
    c.create_topic("alerts")
    publish(c, [{"n": n} for n in range(100)])
    pipeline = Pipeline(source="in", group="g", sink=["out", "alerts"], policy=ORDERED)

    @pipeline.each
    def handle(message: custody.Message) -> object:
        n = message.payload["n"]
        if n % 4 == 0:
            return None
        if n % 4 == 1:
            return {"n": n}
        if n % 4 == 2:
            return [{"n": n}, To({"n": n}, topic="alerts", key="all", headers={"from": message.topic})]
        return custody.Outgoing({"n": n}, headers={"h": "1"})

    summary = run(pipeline, c, spark)
    assert (summary.done, summary.outputs, summary.failed) == (100, 100, 0)
    assert numbers(c) == [n for n in range(100) if n % 4]
    assert numbers(c, "alerts") == [n for n in range(100) if n % 4 == 2]
    assert {(message.key, message.headers["from"]) for message in published(c, "alerts")} == {("all", "in")}
    keys = {message.payload["n"]: message.key for message in published(c)}
    assert keys == {n: f"k{n % 7}" for n in keys}, "an output has the key of its message"
    assert_in_key_order(c)


@pytest.mark.req("S2", "G15")
def test_outputs_may_be_delayed(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": n} for n in range(40)])
    pipeline = Pipeline(source="in", group="g", sink="out", policy=custody.Policy(max_attempts=1))

    @pipeline.each
    def handle(message: custody.Message) -> object:
        delay = {0: None, 1: "1h", 2: "soon"}[message.payload["n"] % 3]
        return custody.Outgoing(message.payload, delay=delay)

    summary = run(pipeline, c, spark)
    assert (summary.done, summary.dead) == (27, 13)
    assert numbers(c) == [n for n in range(40) if n % 3 == 0]
    assert sorted(waiting.payload["n"] for waiting in c.delayed("out")) == [n for n in range(40) if n % 3 == 1]
    assert "'soon' is not a duration" in str(c.dead("in", "g")[0].last_error)


@pytest.mark.req("S2", "S3", "S9")
def test_what_a_handler_raises_decides_what_becomes_of_its_message(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": n} for n in range(40)], keys=40)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED)

    @pipeline.each
    def handle(message: custody.Message) -> object:
        n = message.payload["n"]
        if n == 3:
            raise ValueError("no good")
        if n == 4 and message.attempt == 1:
            raise custody.Retry("again", after="10ms")
        if n == 5:
            raise custody.Dead("never")
        if n == 6 and "x-custody-last-error" not in message.headers:
            raise custody.Later("10ms", "not yet")
        if n == 7:
            raise SystemExit(3)
        if n == 8:
            return {"n": {1, 2}}
        if n == 9:
            raise custody.Skip("cancelled")
        return custody.Skip("cancelled, too") if n == 10 else {"n": n}

    summary = run(pipeline, c, spark)
    dead = {letter.payload["n"]: letter for letter in c.dead("in", "g")}
    assert {n: letter.attempts for n, letter in dead.items()} == {3: 2, 5: 1, 7: 2, 8: 2}
    assert dead[3].last_error == "ValueError: no good"
    assert (dead[3].last_traceback or "").splitlines()[-1] == "ValueError: no good"
    assert " in handle\n" in (dead[3].last_traceback or "")
    assert dead[5].last_error == "never"
    assert "JSON has no form for set" in (dead[8].last_error or "")
    assert (summary.done, summary.dead, summary.skipped, summary.left.waiting) == (34, 4, 2, 0)
    assert set(range(40)) - set(numbers(c)) == {3, 5, 7, 8, 9, 10}


@pytest.mark.req("S2")
def test_a_failing_message_stops_its_key_until_it_is_done_or_dead(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": n} for n in range(70)])
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED)

    @pipeline.each
    def handle(message: custody.Message) -> object:
        if message.key == "k3" and message.payload["n"] % 3 == 0 and message.attempt == 1:
            raise TimeoutError("not now")
        if message.payload["n"] == 4:
            raise ValueError("poison")
        return message.payload

    summary = run(pipeline, c, spark)
    assert summary.dead == 1
    assert numbers(c) == [n for n in range(70) if n != 4]
    assert_in_key_order(c)


@pytest.mark.req("S2", "S3")
@pytest.mark.parametrize("style", ["each", "frame"])
def test_a_schema_gives_typed_fields_and_malformed_messages_are_dead(
    c: custody.Custody, spark: SparkSession, style: str
) -> None:
    good = [{"n": n, "price": n / 2, "tags": ["a", None], "extra": True} for n in range(20)]
    bad = ["text", {"n": "x"}, [1], {"n": 2**40}, b"\x00\x01"]
    publish(c, [*good, *bad], keys=1000)
    pipeline = Pipeline(
        source="in",
        group="g",
        sink="out",
        policy=ORDERED,
        schema="n int, price double, tags array<string>, more string",
    )
    if style == "each":

        @pipeline.each
        def handle(message: custody.Message) -> object:
            assert list(message.payload) == ["n", "price", "tags", "more"]
            return {**message.payload, "double": message.payload["price"] * 2}

    else:

        @pipeline.frame
        def transform(frame: DataFrame) -> DataFrame:
            assert dict(frame.dtypes)["tags"] == "array<string>"
            return frame.withColumn("double", F.col("price") * 2)

    summary = run(pipeline, c, spark)
    assert (summary.done, summary.dead) == (20, 5)
    assert [message.payload for message in sorted(published(c), key=lambda m: m.payload["n"])] == [
        {"n": n, "price": n / 2, "tags": ["a", None], "more": None, "double": float(n)} for n in range(20)
    ]
    assert all(letter.attempts == 1 for letter in c.dead("in", "g"))


@pytest.mark.req("S2")
def test_a_frame_filters_explodes_joins_and_routes(c: custody.Custody, spark: SparkSession) -> None:
    c.create_topic("alerts", partitions=3)
    publish(c, [{"n": n, "sku": f"s{n % 3}"} for n in range(60)])
    names = spark.createDataFrame([("s0", "zero"), ("s1", "one")], "sku string, name string")
    pipeline = Pipeline(source="in", group="g", sink=["out", "alerts"], policy=ORDERED, schema="n int, sku string")

    @pipeline.frame
    def transform(frame: DataFrame) -> DataFrame:
        joined = frame.join(names, "sku", "left").where(F.col("n") % 5 != 0)
        parts = joined.withColumn("part", F.explode(F.array(F.lit("x"), F.lit("y"))))
        return parts.withColumn("_topic", F.when(F.col("sku") == "s2", "alerts"))

    summary = run(pipeline, c, spark)
    kept = [n for n in range(60) if n % 5]
    assert summary.done == 60
    assert numbers(c) == sorted(n for n in kept if n % 3 != 2 for _ in "xy")
    assert numbers(c, "alerts") == sorted(n for n in kept if n % 3 == 2 for _ in "xy")
    assert {message.payload["name"] for message in published(c)} == {"zero", "one"}
    for topic in ("out", "alerts"):
        last: dict[str | None, tuple[int, str]] = {}
        for message in published(c, topic):
            place = (message.payload["n"], message.payload["part"])
            assert place > last.get(message.key, (-1, ""))
            last[message.key] = place


@pytest.mark.req("S2", "S3")
def test_fail_when_charges_the_marked_rows_and_their_key_waits(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": n} for n in range(70)])
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED, schema="n int")

    @pipeline.frame
    def transform(frame: DataFrame) -> DataFrame:
        late = (F.col("n") == 10) & (F.col("_attempt") == 1)
        return (
            frame.transform(fail_when(F.col("n") == 12, F.concat(F.lit("no "), F.col("n"))))
            .transform(fail_when(late, "late", retry_after="20ms"))
            .transform(fail_when(F.col("n") == 13, "given up", dead=True))
            .transform(skip_when(F.col("n").isin(13, 14), F.concat(F.lit("cancelled "), F.col("n"))))
        )

    summary = run(pipeline, c, spark)
    dead = {letter.payload["n"]: (letter.last_error, letter.attempts) for letter in c.dead("in", "g")}
    assert dead == {12: ("no 12", 2), 13: ("given up", 1)}
    assert (summary.dead, summary.skipped) == (2, 1), "the first mark of a row counts"
    assert numbers(c) == [n for n in range(70) if n not in (12, 13, 14)]
    (skipped,) = [message for message in published(c, "in") if message.payload["n"] == 14]
    assert c.trace("in", skipped.partition, skipped.offset)[-1].error == "cancelled 14"
    assert_in_key_order(c)


def jobs_so_far(spark: SparkSession) -> int:
    return int(spark.sparkContext._jsc.sc().dagScheduler().numTotalJobs())


@pytest.mark.chaos
@pytest.mark.req("S3")
@pytest.mark.parametrize("shuffles", [False, True])
def test_a_row_that_breaks_a_cast_or_a_udf_is_alone_charged(
    c: custody.Custody, spark: SparkSession, shuffles: bool
) -> None:
    publish(c, [{"n": n, "add": "x" if n == 10 else str(n)} for n in range(24)])
    pipeline = Pipeline(
        source="in",
        group="g",
        sink="out",
        policy=ONCE,
        schema="n int, add string",
    )

    @pipeline.frame
    def transform(frame: DataFrame) -> DataFrame:
        @F.udf("int", useArrow=False)
        def inverse(n):  # type: ignore[no-untyped-def]
            return 1000 // (n - 17)

        broken = frame.withColumn("add", F.col("add").cast("int")).withColumn("inverse", inverse("n"))
        return broken.repartition(2) if shuffles else broken

    before = jobs_so_far(spark)
    summary = run(pipeline, c, spark)
    jobs = jobs_so_far(spark) - before
    # one job more for a batch that breaks, with each message as a slice; 17 waits behind 10, and is then alone in its
    # batch, which takes a job without messages too: is it really the message?
    more = jobs - summary.batches
    assert more > 6 if shuffles else more == 3, (jobs, summary.batches)
    dead = {letter.payload["n"]: letter.last_error or "" for letter in c.dead("in", "g")}
    assert set(dead) == {10, 17}
    assert "CAST_INVALID_INPUT" in dead[10]
    assert "ZeroDivisionError" in dead[17]
    assert (summary.done, summary.failed) == (22, 2)
    assert numbers(c) == [n for n in range(24) if n not in (10, 17)]
    assert_in_key_order(c)


@pytest.mark.req("S3")
def test_a_bad_row_that_is_alone_in_its_batch_is_charged_too(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": 1, "add": "x"}])
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED, schema="n int, add string")
    pipeline.frame(lambda frame: frame.withColumn("add", F.col("add").cast("int")))
    run(pipeline, c, spark)
    assert [(letter.attempts, "CAST_INVALID_INPUT" in letter.errors[0]) for letter in c.dead("in", "g")] == [(2, True)]


@pytest.mark.chaos
@pytest.mark.req("S3")
def test_a_handler_that_kills_its_python_worker_fails_like_any_other(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": n} for n in range(600)])
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ONCE)

    @pipeline.each
    def handle(message: custody.Message) -> object:
        if message.payload["n"] in (100, 333):
            os._exit(9)
        return message.payload

    run(pipeline, c, spark)
    dead = {letter.payload["n"]: letter.last_error for letter in c.dead("in", "g")}
    assert dead == {100: KILLED, 333: KILLED}
    assert numbers(c) == [n for n in range(600) if n not in (100, 333)]
    assert_in_key_order(c)


@pytest.mark.req("S5")
def test_claims_shrink_to_what_a_sink_can_take_and_wait_for_its_readers(
    c: custody.Custody, spark: SparkSession
) -> None:
    c.create_topic("small", max_depth=40)
    c.create_group("small", "readers", start="earliest")
    publish(c, [{"n": n} for n in range(80)])
    pipeline = Pipeline(source="in", group="g", sink="small")
    pipeline.each(lambda message: message.payload)
    sizes: list[int] = []
    troubles: list[str] = []

    def read_all(batch: Batch) -> None:
        sizes.append(batch.committed.messages)
        lease = c.claim("small", "readers", max_messages=1000)
        lease.ack(lease.messages)

    summary = run(pipeline, c, spark, on_batch=read_all, on_trouble=troubles.append)
    assert (summary.done, summary.restarts) == (80, 1)
    assert numbers(c, "small") == [*range(80)]
    assert max(sizes) <= 40
    assert "80 messages are 80 for one partition of 'small', which holds 40" in troubles[0]


@pytest.mark.req("S3")
def test_a_message_whose_results_fit_no_sink_fails_alone(c: custody.Custody, spark: SparkSession) -> None:
    c.create_topic("small", max_depth=2)
    c.create_group("small", "readers", start="earliest")
    publish(c, [{"n": n} for n in range(3)])
    pipeline = Pipeline(source="in", group="g", sink="small", policy=ONCE)
    pipeline.each(lambda message: [message.payload] * (5 if message.payload["n"] == 1 else 1))
    summary = run(pipeline, c, spark, max_per_batch=1)
    assert (summary.done, summary.dead) == (2, 1)
    assert [letter.last_error for letter in c.dead("in", "g")] == [
        "its results are 5 for one partition of 'small', which holds 2"
    ]


@pytest.mark.chaos
@pytest.mark.req("S5")
def test_batches_are_as_large_as_the_time_for_them_allows(c: custody.Custody, spark: SparkSession) -> None:
    def slow(message: custody.Message) -> object:
        time.sleep(0.01)
        return message.payload

    publish(c, [{"n": n} for n in range(900)], keys=100)
    pipeline = Pipeline(source="in", group="g", sink="out")
    pipeline.each(slow)
    sizes: list[int] = []
    run(pipeline, c, spark, batch_time="1s", on_batch=lambda batch: sizes.append(batch.committed.messages))
    assert sizes[0] == 500
    assert all(size < 300 for size in sizes[1:]), "two tasks do 200 in a second"
    assert numbers(c) == [*range(900)]


@pytest.mark.req("S9")
def test_one_pass_leaves_what_has_to_wait_and_says_so(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": n} for n in range(30)])
    policy = custody.Policy(ordering="key", backoff=custody.Constant("1h"))
    pipeline = Pipeline(source="in", group="g", sink="out", policy=policy)

    @pipeline.each
    def handle(message: custody.Message) -> object:
        if message.payload["n"] == 0:
            raise ValueError("no")
        return message.payload

    summary = run(pipeline, c, spark, drain=None, available_now=True)
    assert (summary.done, summary.failed, summary.left.waiting, summary.left.parked) == (25, 1, 1, 4)
    assert summary.left.next_due is not None
    assert 3500 < summary.left.next_due < 3700
    assert summary.left.blocked_keys == 1


@pytest.mark.req("S2")
@pytest.mark.parametrize("lossy", ["aggregate", "limit", "dropped", "window"])
def test_a_frame_that_loses_its_messages_is_refused_at_the_start(
    c: custody.Custody, spark: SparkSession, lossy: str
) -> None:
    publish(c, [{"n": 1}])
    pipeline = Pipeline(source="in", group="g", sink="out", schema="n int")

    @pipeline.frame
    def transform(frame: DataFrame) -> DataFrame:
        if lossy == "aggregate":
            return frame.groupBy("n").agg(F.max("_offset").alias("_offset"), F.max("_partition").alias("_partition"))
        if lossy == "limit":
            return frame.limit(3)
        if lossy == "window":
            return frame.withColumn("rank", F.row_number().over(Window.orderBy("n")))
        return frame.select("n", "_offset")

    with pytest.raises(PipelineRefused, match=r"readStream\.format\('custody'\)"):
        run(pipeline, c, spark)
    assert c.groups("in") == []
    assert published(c) == []


@pytest.mark.req("S2")
def test_an_aggregate_by_message_is_allowed(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": n, "xs": [n, n + 1]} for n in range(20)])
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED, schema="n int, xs array<int>")

    @pipeline.frame
    def transform(frame: DataFrame) -> DataFrame:
        exploded = frame.select("_partition", "_offset", "_key", "n", F.explode("xs").alias("x"))
        return exploded.groupBy("_partition", "_offset", "_key", "n").agg(F.sum("x").alias("total"))

    assert run(pipeline, c, spark).done == 20
    totals = {message.payload["n"]: message.payload["total"] for message in published(c)}
    assert totals == {n: 2 * n + 1 for n in range(20)}
    assert_in_key_order(c)


def test_a_missing_sink_is_refused_before_anything_is_claimed(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": 1}])
    pipeline = Pipeline(source="in", group="g", sink="nowhere")
    pipeline.each(lambda message: message.payload)
    with pytest.raises(TopicNotFound, match="nowhere"):
        run(pipeline, c, spark)
    assert c.groups("in") == []


@pytest.mark.req("S10")
@pytest.mark.parametrize("style", ["each", "frame"])
def test_a_trial_settles_nothing(c: custody.Custody, spark: SparkSession, style: str) -> None:
    publish(c, [{"n": n, "add": "x" if n == 3 else str(n)} for n in range(6)] + ["text"])
    pipeline = Pipeline(source="in", group="g", sink="out", schema="n int, add string")
    if style == "each":

        @pipeline.each
        def handle(message: custody.Message) -> object:
            return {"sum": message.payload["n"] + int(message.payload["add"])}

    else:

        @pipeline.frame
        def transform(frame: DataFrame) -> DataFrame:
            total = F.col("n") + F.col("add").cast("int")
            return frame.select("_partition", "_offset", "_key", total.alias("sum"))

    trials = pipeline.try_out(c, spark=spark, limit=20)
    found = {trial.message.payload["n"]: trial for trial in trials if trial.message.payload != "text"}
    assert [trial.outcome for trial in trials if trial.message.payload == "text"] == ["dead"]
    assert {n: trial.outcome for n, trial in found.items() if trial.outcome != "ack"} == {3: "nack"}
    assert len(found) == 6
    assert [output.payload for output in found[5].outputs] == [{"sum": 10}]
    assert found[3].error
    assert published(c) == []
    assert [group.name for group in c.groups("in")] == []


@pytest.mark.req("S6")
def test_figures_reach_sparks_own_progress(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [{"n": n} for n in range(50)])
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED)

    @pipeline.each
    def handle(message: custody.Message) -> object:
        if message.payload["n"] == 5:
            raise custody.Dead("no")
        return message.payload

    seen: list[Any] = []

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None: ...
        def onQueryTerminated(self, event: Any) -> None: ...
        def onQueryIdle(self, event: Any) -> None: ...
        def onQueryProgress(self, event: Any) -> None:
            seen.append(json.loads(event.progress.json))

    listener = Listener()
    spark.streams.addListener(listener)
    try:
        run(pipeline, c, spark)
        wait_for(lambda: len(seen) >= 1, "the listener to be told")
    finally:
        spark.streams.removeListener(listener)
    assert sum(progress["numInputRows"] for progress in seen) == 50
    latest = seen[-1]["sources"][0]["latestOffset"]
    assert {"lag", "waiting", "parked", "dead", "blocked_keys"} <= set(latest)
