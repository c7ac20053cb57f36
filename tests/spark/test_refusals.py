"""Sinks outside of the database that refuse: a row dies alone, a sink that is down is waited for, and one that takes
nothing ends the pipeline at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import custody
from custody.errors import PipelineFailed
from custody.spark import Files, Pipeline, PipelineSummary, Write

pytestmark = pytest.mark.req("S3")
ONCE = custody.Policy(ordering="key", max_attempts=1)
SCHEMA = "n int, name string"
URL = "jdbc:derby:memory:refusals;create=true"


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the server's own clock: Spark's processes know no other."""
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        yield opened


def publish(c: custody.Custody, numbers: list[int], long: int | None = None) -> None:
    names = {n: "x" * 300 if n == long else f"name{n % 3}" for n in numbers}
    c.publish_many("in", [custody.Outgoing({"n": n, "name": names[n]}, key=f"k{n}") for n in numbers])


def run(pipeline: Pipeline, c: custody.Custody, spark: SparkSession, **settings: Any) -> PipelineSummary:
    return pipeline.run(c, spark=spark, **({"drain": "20s", "batch_time": "10m"} | settings))


def passing(*sink: Any) -> Pipeline:
    pipeline = Pipeline(source="in", group="g", sink=sink, policy=ONCE, schema=SCHEMA)
    pipeline.frame(lambda frame: frame.select("_partition", "_offset", "_key", "n", "name"))
    return pipeline


def untouched(c: custody.Custody, messages: int) -> bool:
    stats = c.stats("in", "g")
    return (stats.dead, stats.in_flight, stats.waiting + stats.lag) == (0, 0, messages)


@pytest.fixture
def execute(spark: SparkSession) -> Callable[[str], None]:
    """A statement in the database beside Spark."""
    connect: Any = spark._jvm.java.sql.DriverManager.getConnection  # type: ignore[union-attr]

    def run(statement: str) -> None:
        connection = connect(URL)
        try:
            connection.createStatement().execute(statement)
        finally:
            connection.close()

    return run


def table(execute: Callable[[str], None], name: str, constraint: str) -> None:
    columns = '"_partition" INT, "_offset" BIGINT, "_key" VARCHAR(20), "n" INT, "name" VARCHAR(400), "claim" BIGINT'
    execute(f"CREATE TABLE {name} ({columns}, {constraint})")


def append(rows: DataFrame, write: Write, name: str) -> None:
    with_claim = rows.withColumn("claim", F.lit(write.claim))
    with_claim.write.format("jdbc").option("url", URL).option("dbtable", name).mode("append").save()


def written(spark: SparkSession, name: str) -> list[int]:
    rows = spark.read.format("jdbc").option("url", URL).option("dbtable", name).load()
    return sorted(row["n"] for row in rows.select("n").collect())


@pytest.mark.chaos
def test_rows_that_a_table_refuses_die_alone(
    c: custody.Custody, spark: SparkSession, execute: Callable[[str], None]
) -> None:
    table(execute, "checked", 'CHECK ("n" NOT IN (3, 20))')
    publish(c, [*range(24)])
    pipeline = passing("out")
    calls: list[int] = []

    @pipeline.write
    def save(rows: DataFrame, write: Write) -> None:
        calls.append(write.claim)
        append(rows, write, "checked")

    summary = run(pipeline, c, spark)
    assert (summary.done, summary.dead, summary.restarts) == (22, 2, 0)
    dead = {letter.payload["n"]: letter.last_error or "" for letter in c.dead("in", "g")}
    assert set(dead) == {3, 20}
    assert all("save: ERROR 23513" in error and "check constraint" in error for error in dead.values())
    good = sorted({*range(24)} - {3, 20})
    assert sorted({*written(spark, "checked")}) == good, "at least once"
    assert sorted(m.payload["n"] for p in range(2) for m in c.read("out", p, max_messages=100)) == good, "once"
    assert set(calls) == {1}
    assert len(calls) < 24, "fewer than one for each row"


@pytest.mark.chaos
def test_a_function_that_replaces_its_claim_has_each_row_once_and_a_lone_row_dies_too(
    c: custody.Custody, spark: SparkSession, execute: Callable[[str], None]
) -> None:
    table(execute, "keyed", 'UNIQUE ("n")')
    publish(c, [*range(8)])
    pipeline = passing("out")

    @pipeline.write
    def save(rows: DataFrame, write: Write) -> None:
        execute(f'DELETE FROM keyed WHERE "claim" = {write.claim}')
        append(rows, write, "keyed")

    run(pipeline, c, spark)
    publish(c, [5, 7, 8])
    summary = run(pipeline, c, spark, max_per_batch=1)
    assert (summary.done, summary.dead) == (1, 2)
    assert written(spark, "keyed") == [*range(9)]
    errors = {letter.payload["n"]: letter.last_error or "" for letter in c.dead("in", "g")}
    assert set(errors) == {5, 7}
    assert all("duplicate key" in error for error in errors.values())


@pytest.mark.chaos
def test_a_row_that_files_refuse_dies_alone_and_the_others_are_there_once(
    c: custody.Custody, spark: SparkSession, tmp_path: Path
) -> None:
    publish(c, [*range(12)], long=7)
    home = str(tmp_path / "table")
    pipeline = passing("out", Files(home, partition_by=["name"]))
    summary = run(pipeline, c, spark)
    assert (summary.done, summary.dead) == (11, 1)
    (letter,) = c.dead("in", "g")
    assert letter.payload["n"] == 7
    assert f"parquet files in {home}: java.io.IOException: Mkdirs failed" in (letter.last_error or "")
    good = sorted({*range(12)} - {7})
    assert sorted(row["n"] for row in spark.read.parquet(home).collect()) == good
    assert sorted(m.payload["n"] for p in range(2) for m in c.read("out", p)) == good
    assert [path for path in Path(home, "_custody").rglob("*") if path.is_file()] == []


@pytest.mark.chaos
def test_a_sink_that_refuses_together_what_it_took_in_parts_ends_the_pipeline(
    c: custody.Custody, spark: SparkSession, execute: Callable[[str], None]
) -> None:
    """It appends, and has a key: a claim cannot be written again."""
    table(execute, "appended", 'UNIQUE ("n"), CHECK ("n" <> 3)')
    publish(c, [*range(8)])
    pipeline = passing("out")
    pipeline.write(lambda rows, write: append(rows, write, "appended"))
    with pytest.raises(PipelineFailed, match=r"accepted the rows of claim 1 in parts.*duplicate key.*write\.claim"):
        run(pipeline, c, spark)
    assert untouched(c, 8)


@pytest.mark.chaos
@pytest.mark.parametrize("refuses", ["everything", "rows", "nothing that is said"])
def test_a_sink_that_takes_nothing_ends_the_pipeline_at_once(
    c: custody.Custody, spark: SparkSession, refuses: str
) -> None:
    publish(c, [*range(20)])
    pipeline = passing("out")
    calls: list[int] = []

    @pipeline.write
    def save(rows: DataFrame, write: Write) -> None:
        calls.append(write.claim)
        if refuses == "everything":
            raise OSError("the disk is full")
        if refuses == "nothing that is said":
            rows.select("no_such_column").collect()
        if rows.count() > 0:
            raise ValueError("the table is read only")

    with pytest.raises(PipelineFailed, match=r"save accepts no row of claim 1, so no single row is at fault"):
        run(pipeline, c, spark)
    assert len(calls) == {"everything": 3, "rows": 11, "nothing that is said": 1}[refuses]
    assert untouched(c, 20)


@pytest.mark.chaos
def test_a_sink_that_is_down_is_waited_for_and_nobody_is_charged(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, [*range(20)])
    pipeline = passing("out")
    calls: list[int] = []

    @pipeline.write
    def save(rows: DataFrame, _write: Write) -> None:
        calls.append(rows.count())
        if len(calls) < 6:
            raise ConnectionRefusedError("Connection refused")

    troubles: list[str] = []
    summary = run(pipeline, c, spark, on_trouble=troubles.append)
    assert (summary.done, summary.failed, summary.restarts) == (20, 0, 0)
    assert calls == [20, 20, 0, 20, 0, 20], "again and again; each time the sink is tried with nothing too"
    assert "did not accept claim 1: Connection refused" in troubles[0]


@pytest.mark.chaos
def test_what_is_behind_a_refused_row_of_its_key_waits_for_it(c: custody.Custody, spark: SparkSession) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n, "name": ""}, key=f"k{n % 2}") for n in range(10)])
    policy = custody.Policy(ordering="key", max_attempts=5, backoff=custody.Constant("10ms"))
    pipeline = Pipeline(source="in", group="g", sink="out", policy=policy, schema=SCHEMA)
    pipeline.frame(lambda frame: frame)
    refused: list[int] = []

    @pipeline.write
    def save(rows: DataFrame, write: Write) -> None:
        found = {row["n"] for row in rows.collect()}
        if 3 in found and write.claim == min([*refused, write.claim]):  # in its first claim
            refused.append(write.claim)
            raise ValueError("3 is not taken yet")

    summary = run(pipeline, c, spark, drain="60s")
    assert (summary.done, summary.dead) == (10, 0)
    assert len(refused) > 1, "it was looked for among the others"
    out = [message for partition in range(2) for message in c.read("out", partition)]
    for key in range(2):
        assert [message.payload["n"] for message in out if message.key == f"k{key}"] == [*range(key, 10, 2)]
