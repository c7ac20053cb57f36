"""Sinks outside of the database: files with each done message once, and functions that write anywhere."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.functions import udf
from tests.waiting import wait_for

import custody
from custody.errors import Conflict, InvalidArgument, PipelineFailed, PipelineRefused
from custody.spark import Files, Pipeline, PipelineSummary, To, Write, fail_when
from custody.spark.outside.cached_rows import LOST

pytestmark = pytest.mark.req("S5")

ONCE = custody.Policy(ordering="key", max_attempts=1)
ROW = "n int, half double"


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the server's own clock: Spark's processes know no other."""
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        yield opened


@pytest.fixture
def table(tmp_path: Path) -> str:
    return str(tmp_path / "table")


def publish(c: custody.Custody, count: int, keys: int = 7) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n % keys}") for n in range(count)])


def run(pipeline: Pipeline, c: custody.Custody, spark: SparkSession, **settings: Any) -> PipelineSummary:
    return pipeline.run(c, spark=spark, **({"drain": "20s", "max_per_batch": 150, "batch_time": "10m"} | settings))


def halved(message: custody.Message) -> object:
    return {"n": message.payload["n"], "half": message.payload["n"] / 2}


def numbers(rows: DataFrame) -> list[int]:
    return sorted(row["n"] for row in rows.select("n").collect())


def files_left(table: str) -> list[Path]:
    return [path for path in Path(table, "_custody").rglob("*") if path.is_file()]


def test_a_handlers_results_are_typed_rows_with_their_messages(
    c: custody.Custody, spark: SparkSession, table: str
) -> None:
    def handle(message: custody.Message) -> object:
        n = message.payload["n"]
        if n == 5:
            raise ValueError("no good")
        if n == 6:
            return {"n": "six"}  # does not fit the schema
        if n == 7:
            return b"\x00"
        if n == 8:
            return None
        return [halved(message), To({"n": n}, topic="alerts")] if n == 9 else halved(message)

    c.create_topic("alerts")
    publish(c, 300)
    pipeline = Pipeline(source="in", group="g", sink=["out", "alerts", Files(table, schema=ROW)], policy=ONCE)
    pipeline.each(handle)
    summary = run(pipeline, c, spark)
    assert (summary.done, summary.dead) == (297, 3)
    rows = spark.read.parquet(table)
    assert rows.schema.simpleString() == "struct<_partition:int,_offset:bigint,_key:string,n:int,half:double>"
    assert numbers(rows) == sorted({*range(300)} - {5, 6, 7, 8})
    assert {tuple(row) for row in rows.select("_partition", "_offset", "n").collect()} == {
        (message.partition, message.offset, message.payload["n"])
        for p in range(2)
        for message in c.read("in", p, max_messages=1000)
        if message.payload["n"] not in (5, 6, 7, 8)
    }
    assert [message.payload for message in c.read("alerts", 0)] == [{"n": 9}], "not in the files: it named its topic"
    reasons = {letter.payload["n"]: letter.last_error or "" for letter in c.dead("in", "g")}
    assert reasons[5] == "ValueError: no good"
    assert "does not fit the schema of its sink" in reasons[6]
    assert "bytes cannot be a row" in reasons[7]
    assert files_left(table) == []


def test_a_handlers_results_without_a_schema_are_text(c: custody.Custody, spark: SparkSession, table: str) -> None:
    publish(c, 3)
    pipeline = Pipeline(source="in", group="g", sink=Files(table, format="json"))
    pipeline.each(lambda message: {"n": message.payload["n"]})
    run(pipeline, c, spark)
    assert sorted(row["payload"] for row in spark.read.json(table).collect()) == ['{"n":0}', '{"n":1}', '{"n":2}']


@pytest.mark.chaos
def test_a_frames_columns_go_out_as_they_are(c: custody.Custody, spark: SparkSession, table: str) -> None:
    publish(c, 24)
    pipeline = Pipeline(
        source="in", group="g", sink=["out", Files(table, partition_by=["third"])], policy=ONCE, schema="n int"
    )

    @pipeline.frame
    def change(messages: DataFrame) -> DataFrame:
        n = F.col("n")
        return (
            messages.transform(fail_when(n == 20, "marked"))
            .withColumn("third", n % 3)
            .withColumn("at", F.timestamp_seconds(n))
            .withColumn("price", n.cast("decimal(10,2)"))
            .withColumn("broken", F.when(n == 10, F.raise_error(F.lit("no good")).cast("int")))
        )

    summary = run(pipeline, c, spark, max_per_batch=12)
    assert (summary.done, summary.dead, summary.outputs) == (22, 2, 22)
    rows = spark.read.parquet(table)
    assert {field.name: field.dataType.simpleString() for field in rows.schema} == {
        "_partition": "int", "_offset": "bigint", "_key": "string",
        "n": "int", "at": "timestamp", "price": "decimal(10,2)", "broken": "int", "third": "int",
    }  # fmt: skip
    assert numbers(rows) == sorted({*range(24)} - {10, 20})
    assert rows.where("third <> n % 3 or at <> timestamp_seconds(n)").count() == 0
    assert {path.name for path in Path(table).iterdir()} == {"third=0", "third=1", "third=2", "_custody"}


@pytest.mark.chaos
def test_later_messages_of_a_failed_key_are_not_written_before_it(
    c: custody.Custody, spark: SparkSession, table: str
) -> None:
    """A frame has made the rows of the whole key by then; they are held back, and written once."""
    policy = custody.Policy(ordering="key", max_attempts=3, backoff=custody.Constant("20ms"))
    publish(c, 60, keys=3)
    pipeline = Pipeline(source="in", group="g", sink=Files(table), policy=policy, schema="n int")
    pipeline.frame(lambda frame: frame.transform(fail_when((F.col("n") == 9) & (F.col("_attempt") == 1), "not yet")))
    seen: list[list[int]] = []
    pipeline.write(lambda rows, _: seen.append(numbers(rows)))
    run(pipeline, c, spark)
    assert seen[0] == sorted({*range(60)} - {*range(9, 60, 3)})
    assert seen[1][0] == 9
    assert [n for rows in seen[1:] for n in rows] == [*range(9, 60, 3)]
    assert numbers(spark.read.parquet(table)) == [*range(60)]


def test_a_function_is_called_again_with_the_same_claim(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, 300)
    calls: list[tuple[int, int]] = []
    table: dict[int, list[int]] = {}
    pipeline = Pipeline(source="in", group="g")
    pipeline.each(halved)

    @pipeline.write(schema=ROW)
    def save(rows: DataFrame, write: Write) -> None:
        calls.append((write.claim, write.epoch))
        table[write.claim] = numbers(rows)
        if len(calls) == 1:
            raise OSError("the disk is full")

    summary = run(pipeline, c, spark)
    assert (summary.done, summary.failed, summary.restarts) == (300, 0, 0)
    assert [claim for claim, _ in calls] == [1, 1, 2]
    assert sorted(n for claim in table.values() for n in claim) == [*range(300)], "once for each claim"


def test_a_function_that_always_fails_loses_and_charges_nothing(
    c: custody.Custody, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("custody.spark.driver.settlement.RESTARTS", 1)
    publish(c, 10)
    pipeline = Pipeline(source="in", group="g", sink="out")
    pipeline.each(halved)

    @pipeline.write
    def save(_rows: DataFrame, _write: Write) -> None:
        raise OSError("the disk is full")

    with pytest.raises(PipelineFailed, match="the disk is full"):
        run(pipeline, c, spark)
    stats = c.stats("in", "g")
    assert (stats.waiting + stats.lag, stats.dead) == (10, 0)
    assert c.read("out", 0) == c.read("out", 1) == []


@pytest.mark.chaos
@pytest.mark.parametrize("style", ["each", "each, then nothing", "frame", "frame, then nothing"])
def test_rows_that_had_to_be_made_again_are_not_trusted(
    c: custody.Custody, spark: SparkSession, table: str, tmp_path: Path, style: str
) -> None:
    """As when an executor is lost between the job and the write: what comes out the second time may be different."""
    again = tmp_path / "made again"

    def handle(message: custody.Message) -> object:
        gone = again.exists() and "nothing" in style
        return None if gone else {"n": message.payload["n"], "luck": random.random()}

    @udf("double")
    def luck(_):  # type: ignore[no-untyped-def]  # Spark takes hints for a kind of function
        return None if again.exists() and "nothing" in style else random.random()

    publish(c, 100)
    sink = Files(table, schema="n int, luck double" if "each" in style else None)
    pipeline = Pipeline(source="in", group="g", schema="n int", policy=ONCE)
    counts: list[int] = []

    @pipeline.write
    def lose(rows: DataFrame, _write: Write) -> None:
        if not counts:
            counts.append(0)
            again.touch()
            rows.sparkSession.catalog.clearCache()
        try:
            counts.append(rows.count())
        finally:
            again.unlink(missing_ok=True)

    pipeline.sinks, pipeline.outside = ("out",), (*pipeline.outside, sink)
    if "each" in style:
        pipeline.each(handle)
    else:
        pipeline.frame(lambda frame: frame.withColumn("luck", luck("n")).where("luck is not null"))
    troubles: list[str] = []
    run(pipeline, c, spark, on_trouble=troubles.append)
    assert counts == [0, 100], "the second time it could not even be counted"
    assert LOST in troubles[0] or "frame" in style, "there Spark's own second try of the task is in the way"
    published = {m.payload["n"]: m.payload["luck"] for p in range(2) for m in c.read("out", p, max_messages=1000)}
    written = {row["n"]: row["luck"] for row in spark.read.parquet(table).collect()}
    assert written == published, "the same attempt's"
    assert spark.read.parquet(table).count() == 100


def test_what_an_earlier_run_of_the_batch_had_is_not_shown(
    c: custody.Custody, spark: SparkSession, table: str, tmp_path: Path
) -> None:
    """The second run of the same claim has no rows at all: nothing of the first may stay."""
    mark = tmp_path / "failed once"
    publish(c, 10)
    pipeline = Pipeline(source="in", group="g", sink=Files(table, schema=ROW), policy=ONCE)
    pipeline.each(lambda message: None if mark.exists() else halved(message))
    counts: list[int] = []

    @pipeline.write(schema=ROW)
    def fail_once(rows: DataFrame, _write: Write) -> None:
        counts.append(rows.count())
        if not mark.exists():
            mark.touch()
            raise OSError("the disk is full")

    run(pipeline, c, spark)
    assert counts == [10, 0]
    assert files_left(table) == []
    assert spark.read.schema(ROW).parquet(table).count() == 0


@pytest.mark.chaos
def test_what_is_taken_away_while_it_is_written_is_not_shown(
    c: custody.Custody, db: psycopg.Connection, spark: SparkSession, table: str
) -> None:
    publish(c, 20)
    sink = Files(table, schema=ROW, partition_by=["n"], options={"partitionOverwriteMode": "dynamic"})
    pipeline = Pipeline(source="in", group="g", sink=["out", sink], policy=ONCE)
    pipeline.each(halved)
    times = Counter[str]()

    @pipeline.write(schema=ROW)
    def take_away(_rows: DataFrame, _write: Write) -> None:
        times["written"] += 1
        if times["written"] == 1:  # one lease: the rest of the claim goes on without its messages
            db.execute("UPDATE custody.leases SET deadline = now() - interval '1 s' WHERE partition = 0")
        elif times["written"] == 3:  # all of the next claim
            db.execute("UPDATE custody.leases SET deadline = now() - interval '1 s'")

    troubles: list[str] = []
    summary = run(pipeline, c, spark, max_per_batch=14, on_trouble=troubles.append)
    assert summary.done == 20
    assert "whose results were written are done" in troubles[0]
    rows = spark.read.parquet(table)
    assert numbers(rows) == [*range(20)]
    assert sorted(m.payload["n"] for p in range(2) for m in c.read("out", p)) == [*range(20)]
    assert files_left(table) == []
    assert db.execute("SELECT count(*) FROM custody.pipeline_writes").fetchone() == (0,)


def test_a_sink_that_was_taken_away_with_results_in_it_is_asked_for(
    c: custody.Custody, db: psycopg.Connection, spark: SparkSession, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("custody.spark.driver.settlement.RESTARTS", 1)
    publish(c, 20)
    files = Files(table, schema=ROW)
    pipeline = Pipeline(source="in", group="g", sink=["out", files])
    pipeline.each(halved)
    Path(table).mkdir()
    Path(table, "_SUCCESS").touch()
    monkeypatch.setattr("custody.spark.outside.hadoop.Hadoop.move", _cannot)
    with pytest.raises(PipelineFailed, match="the disk is full"):
        run(pipeline, c, spark)
    assert db.execute("SELECT claim, committed FROM custody.pipeline_writes").fetchall() == [(1, True)]
    monkeypatch.undo()
    with pytest.raises(Conflict, match="has results that are committed and not shown yet"):
        c.delete_group("in", "g")

    without = Pipeline(source="in", group="g", sink="out")
    without.each(halved)
    with pytest.raises(PipelineRefused, match="claim 1 is committed, but its results are not visible yet in: parquet"):
        run(without, c, spark)
    run(pipeline, c, spark)
    assert numbers(spark.read.parquet(table)) == [*range(20)]
    wait_for(lambda: files_left(table) == [], "nothing stays staged")


def _cannot(*_: object) -> None:
    raise OSError("the disk is full")


def test_sinks_that_make_no_sense_are_refused(c: custody.Custody, spark: SparkSession, table: str) -> None:
    twice = Pipeline(source="in", group="g", sink=[Files(table), Files(f"{table}/", format="orc")])
    twice.each(halved)
    with pytest.raises(PipelineRefused, match="has two sinks with one directory"):
        run(twice, c, spark)
    with pytest.raises(InvalidArgument, match="'delta' is not a format of plain files"):
        Files(table, format="delta")
    typed = Pipeline(source="in", group="g", sink=Files(table, schema=ROW))
    typed.frame(lambda frame: frame)
    with pytest.raises(PipelineRefused, match="has a frame, and a schema for a sink"):
        run(typed, c, spark)
    publish(c, 1)
    missing = Pipeline(source="in", group="g", sink=Files(table, partition_by=["day"]))
    missing.frame(lambda frame: frame)
    with pytest.raises(PipelineFailed, match="day"):
        run(missing, c, spark)
    assert c.stats("in", "g").dead == 0


@pytest.mark.parametrize("style", ["each", "frame"])
def test_a_trial_writes_nothing(c: custody.Custody, spark: SparkSession, table: str, style: str) -> None:
    publish(c, 2)
    pipeline = Pipeline(source="in", group="g", sink=Files(table), schema="n int")
    if style == "each":
        pipeline.each(lambda message: {"n": message.payload["n"]})
    else:
        pipeline.frame(lambda frame: frame)
    trials = pipeline.try_out(c, spark=spark)
    outputs = [(output.topic, output.payload) for trial in trials for output in trial.outputs]
    assert outputs == [(f"parquet files in {table}", {"n": 0}), (f"parquet files in {table}", {"n": 1})]
    assert not Path(table).exists()


def test_a_trial_tells_what_does_not_fit_a_sink(c: custody.Custody, spark: SparkSession, table: str) -> None:
    publish(c, 2)
    pipeline = Pipeline(source="in", group="g", sink=Files(table, schema=ROW))
    pipeline.each(lambda message: {"n": "one" if message.payload["n"] else 0})
    good, bad = pipeline.try_out(c, spark=spark)
    assert (good.outcome, bad.outcome) == ("ack", "nack")
    assert "does not fit the schema of its sink" in (bad.error or "")


@pytest.mark.chaos
def test_a_jdbc_table_by_a_function(c: custody.Custody, spark: SparkSession) -> None:
    """At least once; what identifies a row makes it once for readers."""
    url = "jdbc:derby:memory:outside;create=true"
    publish(c, 200)
    pipeline = Pipeline(source="in", group="g", policy=ONCE, schema="n int")
    pipeline.frame(lambda frame: frame.where("n <> 3"))
    calls: list[int] = []

    @pipeline.write
    def save(rows: DataFrame, write: Write) -> None:
        with_claim = rows.withColumn("claim", F.lit(write.claim))
        with_claim.write.format("jdbc").option("url", url).option("dbtable", "results").mode("append").save()
        calls.append(write.claim)
        if len(calls) == 1:
            raise OSError("killed before the commit")

    run(pipeline, c, spark)
    rows = spark.read.format("jdbc").option("url", url).option("dbtable", "results").load()
    assert rows.count() == 199 + 150 - 1, "the first claim is there twice"
    assert numbers(rows.dropDuplicates(["_partition", "_offset"])) == sorted({*range(200)} - {3})
