"""Handlers of whole batches on a real Spark: an outcome for each row, order by key, what breaks a call or a process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

import custody
from custody.errors import InvalidArgument, PipelineFailed
from custody.spark import Files, Pipeline, PipelineSummary, expect, fail, skip
from custody.spark.tasks.ddl import fields_of
from custody.spark.tasks.each import HUNG, KILLED, TOO_LONG

pytestmark = [pytest.mark.req("X8"), pytest.mark.timeout(300)]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

ORDERED = custody.Policy(ordering="key", max_attempts=2, backoff=custody.Constant("20ms"))
ONCE = custody.Policy(ordering="key", max_attempts=1)


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        yield opened


def publish(c: custody.Custody, count: int, keys: int = 7) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n % keys}") for n in range(count)])


def published(c: custody.Custody, topic: str = "out") -> list[custody.Message]:
    return [one for p in range(c.topic(topic).partitions) for one in c.read(topic, p, max_messages=10_000)]


def numbers(c: custody.Custody, topic: str = "out") -> list[int]:
    return sorted(message.payload["n"] for message in published(c, topic))


def assert_in_key_order(c: custody.Custody) -> None:
    last: dict[str | None, int] = {}
    for message in published(c):
        assert message.payload["n"] > last.get(message.key, -1)
        last[message.key] = message.payload["n"]


def pipeline(handler: Callable[[Any], object], **settings: Any) -> Pipeline:
    options = {name: settings.pop(name) for name in ("form", "rows") if name in settings}
    made = Pipeline(**({"source": "in", "group": "g", "sink": "out", "policy": ORDERED, "schema": "n long"} | settings))
    made.batch(**options)(handler)
    return made


def run(made: Pipeline, c: custody.Custody, spark: SparkSession, **settings: Any) -> PipelineSummary:
    return made.run(c, spark=spark, **({"drain": "20s", "batch_time": "10m"} | settings))


def test_marks_exceptions_and_malformed_payloads_each_cost_their_message(
    c: custody.Custody, spark: SparkSession
) -> None:
    c.create_topic("alerts")
    publish(c, 200)
    c.publish("in", {"n": "no number"}, key="k1")

    def handle(rows: pa.RecordBatch) -> pa.RecordBatch:
        n = rows.column("n")
        if pc.any(pc.and_(pc.equal(n, 30), pc.equal(rows.column("_attempt"), 1))).as_py():
            raise ValueError("no luck with 30")
        if pc.any(pc.equal(n, 31)).as_py():
            raise ValueError("never any luck with 31")
        rows = fail(rows, pc.and_(pc.equal(n, 60), pc.equal(rows.column("_attempt"), 1)), "not yet", retry_after="10ms")
        rows = fail(rows, pc.equal(n, 61), "never", dead=True)
        rows = skip(rows, pc.equal(n, 62), "not needed")
        topics = pc.if_else(pc.equal(n, 63), pa.scalar("alerts"), pa.scalar(None, pa.string()))
        return rows.append_column("_topic", topics).append_column("double", pc.multiply(n, 2))

    summary = run(pipeline(handle, sink=["out", "alerts"], rows=64), c, spark)
    assert (summary.done, summary.dead, summary.skipped, summary.outputs) == (197, 3, 1, 197)
    assert numbers(c) == [n for n in range(200) if n not in (31, 61, 62, 63)]
    assert numbers(c, "alerts") == [63]
    assert all(message.payload["double"] == 2 * message.payload["n"] for message in published(c))
    assert_in_key_order(c)
    dead = {letter.payload["n"]: letter for letter in c.dead("in", "g")}
    assert {n: letter.attempts for n, letter in dead.items()} == {31: 2, 61: 1, "no number": 1}
    assert dead[31].last_error == "ValueError: never any luck with 31"
    assert " in handle\n" in (dead[31].last_traceback or "")
    assert dead[61].last_error == "never"
    assert "does not fit the schema" in str(dead["no number"].last_error)


@pytest.mark.chaos
def test_frames_of_pandas_and_sinks_outside(c: custody.Custody, spark: SparkSession, tmp_path: Path) -> None:
    publish(c, 100)

    def handle(frame: pd.DataFrame) -> pd.DataFrame:
        frame["half"] = frame["n"] / 2
        return fail(frame[frame["n"] != 5], frame["n"][frame["n"] != 5] == 6, "six")

    sink = Files(str(tmp_path / "files"), schema="n long, half double")
    made = pipeline(handle, form="pandas", sink=["out", sink], policy=ONCE)

    @made.write
    def write(rows: Any, write: custody.spark.Write) -> None:
        (tmp_path / f"{write.claim}").write_text(str(rows.count()))

    summary = run(made, c, spark)
    assert (summary.done, summary.dead, summary.outputs) == (99, 1, 98)
    assert numbers(c) == [n for n in range(100) if n not in (5, 6)]
    rows = spark.read.parquet(str(tmp_path / "files")).collect()
    assert sorted((row["n"], row["half"]) for row in rows) == [(n, n / 2) for n in range(100) if n not in (5, 6)]
    assert sum(int(path.read_text()) for path in tmp_path.glob("[0-9]*")) == 98


def test_wrong_code_pauses_the_group_after_few_calls(c: custody.Custody, spark: SparkSession, tmp_path: Path) -> None:
    publish(c, 2000, keys=100)

    def handle(rows: pa.RecordBatch) -> object:
        with (tmp_path / "calls").open("a") as file:
            file.write("x")
        raise KeyError("amount")

    with pytest.raises(PipelineFailed, match="KeyError: 'amount'"):
        run(pipeline(handle), c, spark)
    assert (tmp_path / "calls").stat().st_size < 200
    assert "KeyError" in str(c.group("in", "g").paused_reason)
    assert not c.dead("in", "g")


def test_a_trial_says_what_a_batch_handler_would_do(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, 6)
    c.publish("in", {"n": "x"})

    def handle(rows: pa.RecordBatch) -> pa.RecordBatch:
        if pc.any(pc.equal(rows.column("n"), 1)).as_py():
            raise ValueError("one")
        return fail(rows, pc.equal(rows.column("n"), 2), "two", dead=True)

    trials = {trial.message.payload["n"]: trial for trial in pipeline(handle).try_out(c, spark=spark)}
    assert {n: trial.outcome for n, trial in trials.items()} == {
        0: "ack", 1: "nack", 2: "dead", 3: "ack", 4: "ack", 5: "ack", "x": "dead",
    }  # fmt: skip
    assert trials[1].error == "ValueError: one"
    assert [output.payload for output in trials[3].outputs] == [{"n": 3}]


def test_expectations_are_counted_in_batches_and_in_the_summary(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, 60, keys=60)
    counted: Counter[str] = Counter()
    conditions = {"below-50": 50, "below-40": 40}
    framed = Pipeline(source="in", group="frame", sink="out", policy=ONCE, schema="n long")

    @framed.frame
    def frame(rows: DataFrame) -> DataFrame:
        rows = rows.transform(expect("below-50", F.col("n") < 50))
        twice = rows.withColumn("copy", F.explode(F.array(F.lit(1), F.lit(2))))
        return twice.transform(expect("below-40", F.when(F.col("n") != 3, F.col("n")) < 40, on="warn"))

    summary = run(framed, c, spark, on_batch=lambda batch: counted.update(batch.unmet))
    assert (summary.done, summary.dead, summary.outputs) == (50, 10, 100)
    assert summary.unmet == counted == {"below-40": 21, "below-50": 10}
    assert {letter.last_error for letter in c.dead("in", "frame")} == {"expectation 'below-50' is not met"}

    def each(message: custody.Message) -> None:
        for name, limit in conditions.items():
            expect(name, message.payload["n"] < limit, on="warn" if limit == 40 else "dead")

    single = Pipeline(source="in", group="each", policy=ONCE)
    single.each(each)
    assert run(single, c, spark).unmet == {"below-40": 10, "below-50": 10}

    def batch(rows: pa.RecordBatch) -> pa.RecordBatch:
        for name, limit in conditions.items():
            rows = expect(name, pc.less(rows["n"], limit), on="warn" if limit == 40 else "dead")(rows)
        return rows

    summary = run(pipeline(batch, policy=ONCE, group="batch"), c, spark)
    assert (summary.unmet, summary.done) == ({"below-40": 20, "below-50": 10}, 50)


@pytest.mark.parametrize(
    "schema",
    [
        "sku string, add int",
        "`odd ``name` bigint NOT NULL COMMENT 'so', b Boolean,c FLOAT, d double ,e decimal(12,2), f DECIMAL, g dec(5)",
        "a array<struct<x:int,y:array<string>>>, m map<string,map<int,double>>, s struct<p: date, q timestamp_ntz>",
        "t timestamp, b binary, i tinyint, j smallint, k byte, l long, r real, n numeric(3,1), date date, int int",
    ],
)
def test_a_schema_is_read_without_spark_as_by_spark(schema: str, spark: SparkSession) -> None:
    assert spark
    assert fields_of(schema) == StructType.fromDDL(schema).jsonValue()


def test_a_pipeline_has_one_function() -> None:
    made = pipeline(lambda rows: rows)
    with pytest.raises(InvalidArgument, match="already has an `each`, a `batch`"):
        made.each(lambda _: None)


def hang() -> None:
    """In C code that holds the interpreter, with every signal blocked: nothing within the process ends this."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(100_000)


@pytest.mark.chaos
@pytest.mark.parametrize(("what", "told"), [("sleep", TOO_LONG), ("hang", HUNG), ("exit", KILLED)])
def test_a_message_that_hangs_or_ends_its_process_is_charged_alone(
    what: str, told: str, c: custody.Custody, spark: SparkSession
) -> None:
    import time

    publish(c, 600, keys=50)

    def handle(rows: pa.RecordBatch) -> pa.RecordBatch:
        if pc.any(pc.equal(rows.column("n"), 333)).as_py():
            if what == "exit":
                os._exit(1)
            time.sleep(60) if what == "sleep" else hang()
        return rows

    policy = custody.Policy(ordering="key", max_attempts=1, handler_timeout="1s")
    summary = run(pipeline(handle, policy=policy), c, spark, drain="120s")
    assert (summary.done, summary.dead) == (599, 1)
    assert told in str(c.dead("in", "g")[0].last_error)
    assert numbers(c) == [n for n in range(600) if n != 333]
    assert_in_key_order(c)
