"""Which frames can be run batch by batch: what is refused before anything is claimed, and what is not refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

import custody
from custody.errors import PipelineRefused
from custody.spark import Files, Pipeline
from custody.spark.driver.batch_jobs import parsed
from custody.spark.driver.frame_check import check
from custody.spark.driver.task_plan import attempts, is_one_stage

pytestmark = pytest.mark.req("S2")
SCHEMA = "n int, sku string, xs array<int>, at timestamp"
MESSAGE = ["_partition", "_offset"]

Frame = Callable[[DataFrame], DataFrame]


def static(frame: DataFrame) -> DataFrame:
    return frame.sparkSession.createDataFrame([("a", 1), ("b", 2)], "sku string, price int")


def sql(query: str) -> Frame:
    def run(frame: DataFrame) -> DataFrame:
        frame.createOrReplaceTempView("messages")
        static(frame).createOrReplaceTempView("prices")
        return frame.sparkSession.sql(query)

    return run


def by_message(frame: DataFrame) -> DataFrame:
    return frame.groupBy(*MESSAGE).agg(F.max("n").alias("most"))


def same(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


def counted(frame: DataFrame) -> DataFrame:
    return frame.groupBy("sku").count()


def counts_with_care(frame: DataFrame) -> DataFrame:
    try:
        frame.count()
    except Exception as error:
        raise RuntimeError("the messages cannot be counted") from error
    return frame


REFUSED: dict[str, tuple[Frame, str]] = {
    "groupBy": (lambda f: f.groupBy("n").agg(*(F.max(one).alias(one) for one in MESSAGE)), r"groupBy\(\)"),
    "groupBy of a false identity": (
        lambda f: f.withColumn("_offset", F.lit(1).cast("bigint")).groupBy(*MESSAGE).agg(F.max("_key").alias("_key")),
        r"groupBy\(\)",
    ),
    "rollup": (lambda f: f.rollup(*MESSAGE).agg(F.max("_key").alias("_key")), r"groupBy\(\)"),
    "distinct": (lambda f: f.select("n").distinct().join(f, "n"), r"distinct\(\)"),
    "dropDuplicates": (lambda f: f.dropDuplicates(["sku"]), r"dropDuplicates\(\)"),
    "applyInPandas": (lambda f: f.groupBy("sku").applyInPandas(lambda one: one, f.schema), r"applyInPandas\(\)"),
    "cogroup": (
        lambda f: f.groupBy("sku").cogroup(static(f).groupBy("sku")).applyInPandas(lambda one, _other: one, f.schema),
        r"cogroup\(\)",
    ),
    "window": (lambda f: f.withColumn("rank", F.row_number().over(Window.orderBy("n"))), "a window function"),
    "limit": (lambda f: f.orderBy("n").limit(3), r"limit\(\)"),
    "offset": (lambda f: f.offset(3), r"offset\(\)"),
    "sample": (lambda f: f.sample(0.1), r"sample\(\)"),
    "subtract": (lambda f: f.drop("_headers").subtract(f.where("n = 1").drop("_headers")), r"subtract\(\)"),
    "intersect": (lambda f: f.drop("_headers").intersect(f.where("n = 1").drop("_headers")), r"intersect\(\)"),
    "zipWithIndex": (lambda f: f.zipWithIndex(), r"zipWithIndex\(\)"),
    "monotonically_increasing_id": (
        lambda f: f.withColumn("id", F.monotonically_increasing_id() + 1),
        r"monotonically_increasing_id\(\)",
    ),
    "withWatermark": (lambda f: f.withWatermark("at", "1 minute").where("n > 1"), r"withWatermark\(\)"),
    "messages with messages": (
        lambda f: f.alias("a").join(f.select("sku", F.col("n").alias("m")).alias("b"), "sku"),
        "joins messages with messages",
    ),
    "messages with a count of messages": (lambda f: f.join(counted(f), "sku"), r"groupBy\(\)"),
    "same partition, other offset": (
        lambda f: f.join(f.select("_partition", F.col("n").alias("m")), "_partition"),
        "joins messages with messages",
    ),
    "full join of one message": (
        lambda f: f.join(f.select(*MESSAGE, F.col("n").alias("m")), MESSAGE, "full"),
        "joins messages with messages",
    ),
    "right join": (lambda f: f.join(static(f), "sku", "right"), r"a join \(right\) that keeps static rows"),
    "full join": (lambda f: f.join(static(f), "sku", "full"), r"a join \(full\) that keeps static rows"),
    "left join of static data": (lambda f: static(f).join(f, "sku", "left"), r"a join \(left\) that keeps static"),
    "static rows for which there is a message": (
        lambda f: (
            static(f)
            .withColumns({"_partition": F.lit(0), "_offset": F.lit(0).cast("bigint"), "_key": F.lit("")})
            .join(f.select("sku"), "sku", "left_semi")
        ),
        r"a join \(left semi\)",
    ),
    "union with static rows": (
        lambda f: f.select(*MESSAGE, "_key", "sku").union(
            static(f).select(F.lit(0), F.lit(0).cast("bigint"), F.lit(""), "sku")
        ),
        "a union with static rows",
    ),
    "union that exchanges columns": (
        lambda f: f.select(*MESSAGE, "_key").union(
            f.select("_partition", F.lit(0).cast("bigint").alias("_offset"), "_key")
        ),
        "changes the column _offset",
    ),
    "scalar subquery": (sql("SELECT * FROM messages WHERE n = (SELECT max(n) FROM messages)"), "a subquery over"),
    "exists subquery": (
        sql("SELECT * FROM messages a WHERE EXISTS (SELECT * FROM messages b WHERE b.n = a.n + 1)"),
        "a subquery over",
    ),
    "lateral subquery": (
        sql("SELECT * FROM messages a, LATERAL (SELECT max(n) AS m FROM messages b WHERE b.sku = a.sku)"),
        "a subquery over",
    ),
    "subquery on the static side": (
        sql(
            "SELECT m.*, price FROM messages m JOIN "
            "(SELECT * FROM prices WHERE price < (SELECT max(n) FROM messages)) USING (sku)"
        ),
        "a subquery over",
    ),
    "common table expression": (
        sql("WITH all AS (SELECT * FROM messages), top AS (SELECT max(n) AS n FROM all) SELECT a.* FROM all a, top"),
        r"groupBy\(\)",
    ),
    "aggregate in pipes": (
        sql("FROM messages |> AGGREGATE max(_offset) AS _offset, max(_key) AS _key GROUP BY _partition"),
        r"groupBy\(\)",
    ),
    "limit in pipes": (sql("FROM messages |> ORDER BY n |> LIMIT 3"), r"limit\(\)"),
    "numbers that are replaced": (lambda f: f.replace(0, 1), "changes the column _partition"),
    "another offset": (lambda f: f.withColumn("_offset", F.col("_offset") + 1), "changes the column _offset"),
    "rows of its own": (
        lambda f: static(f).select(F.lit(0).alias("_partition"), F.lit(0).cast("bigint").alias("_offset"), "sku"),
        "is not derived from its input",
    ),
    "raises": (lambda f: f.where(F.col("no_such_column") > 1), "the frame raised AnalysisException"),
    "no frame": (lambda f: f.count(), "returned int, not a DataFrame"),  # type: ignore[dict-item,return-value]
}


def test_a_frame_whose_result_depends_on_the_batch_is_refused(spark: SparkSession) -> None:
    found: dict[str, str] = {}
    for what, (frame, told) in REFUSED.items():
        try:
            check(spark, frame, parsed(SCHEMA), published=False)
            found[what] = "accepted"
        except PipelineRefused as refused:
            if not re.search(told, refused.message) or not refused.remedy:
                found[what] = str(refused)
    assert found == {}


SOUND: dict[str, Frame] = {
    "rows as they are": lambda f: f,
    "filter, project, explode": lambda f: f.where("n > 1").withColumn("x", F.explode("xs")).drop("xs"),
    "left join": lambda f: f.join(F.broadcast(static(f)), "sku", "left"),
    "inner join": lambda f: f.join(static(f), "sku"),
    "semi join": lambda f: f.join(static(f), "sku", "left_semi"),
    "anti join": lambda f: f.join(static(f), "sku", "left_anti"),
    "cross join": lambda f: f.crossJoin(static(f).select("price")),
    "right join with the messages on the right": lambda f: static(f).join(f, "sku", "right"),
    "aggregated static data": lambda f: f.join(
        counted(static(f)).withColumn("rank", F.row_number().over(Window.orderBy("count"))).limit(10), "sku", "left"
    ),
    "aggregate by message": lambda f: by_message(f.withColumn("x", F.explode("xs"))),
    "aggregate by message, joined with it": lambda f: f.join(by_message(f), MESSAGE, "left"),
    "distinct rows of a message": lambda f: f.select(*MESSAGE, "_key", F.explode("xs")).distinct(),
    "window over a message": lambda f: f.withColumn("x", F.explode("xs")).withColumn(
        "rank", F.row_number().over(Window.partitionBy(*MESSAGE).orderBy("x"))
    ),
    "union of messages": lambda f: f.where("n = 1").unionByName(f.where("n > 1").withColumn("sku", F.lit("b"))),
    "sorted": lambda f: f.orderBy("n").repartition(2, "sku").sortWithinPartitions("n"),
    "unpivot": lambda f: f.withColumn("m", F.lit(1)).unpivot([*MESSAGE, "_key"], ["n", "m"], "name", "value"),
    "renamed and back": lambda f: (
        f.withColumnRenamed("_offset", "o").withColumn("_offset", F.col("o").cast("bigint")).drop("o")
    ),
    "mapInPandas": lambda f: f.mapInPandas(same, f.schema),
    "mapInArrow": lambda f: f.mapInArrow(same, f.schema),
    "applyInPandas by message": lambda f: f.groupBy(*MESSAGE).applyInPandas(lambda one: one, f.schema),
    "user-defined function": lambda f: f.withColumn("m", F.udf(lambda n: n, "int")("n")),
    "random rows": lambda f: f.where(F.rand() < 0.5),
    "cached": lambda f: f.cache().where("n > 1"),
    "SQL": sql(
        "WITH good AS (SELECT * FROM messages WHERE sku IN (SELECT sku FROM prices)) "
        "SELECT g.*, (SELECT max(price) FROM prices) AS top, more.m "
        "FROM good g, LATERAL (SELECT g.n + 1 AS m) AS more"
    ),
    "SQL in pipes": sql("FROM messages |> WHERE n > 1 |> LEFT JOIN prices USING (sku) |> EXTEND n + 1 AS m |> DROP at"),
    "numbers that are missing": lambda f: f.fillna(0).fillna("", ["sku"]),
    "observed": lambda f: f.observe("of a batch", F.count(F.lit(1)).alias("rows")),
    "counts its rows": lambda f: f.where(F.lit(f.count() >= 0)),
    "counts its rows, and tells of errors itself": counts_with_care,
}


def test_a_frame_that_is_made_message_by_message_is_not_refused(spark: SparkSession) -> None:
    found: dict[str, str] = {}
    for what, frame in SOUND.items():
        try:
            check(spark, frame, parsed(SCHEMA), published=False)
        except PipelineRefused as refused:
            found[what] = str(refused)
    assert found == {}


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the server's own clock: Spark's processes know no other."""
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        opened.publish_many("in", [custody.Outgoing({"n": n, "sku": "ab"[n % 2]}, key=f"k{n % 3}") for n in range(12)])
        yield opened


def test_a_refusal_changes_nothing(c: custody.Custody, spark: SparkSession) -> None:
    pipeline = Pipeline(source="in", group="g", sink="out", schema=SCHEMA)
    pipeline.frame(REFUSED["right join"][0])
    with pytest.raises(PipelineRefused, match="a row without a message belongs to none"):
        pipeline.run(c, spark=spark, available_now=True)
    assert c.groups("in") == []


def test_rows_of_a_message_are_joined_united_and_ranked(c: custody.Custody, spark: SparkSession) -> None:
    pipeline = Pipeline(source="in", group="g", sink="out", schema=SCHEMA, policy=custody.Policy(ordering="key"))

    @pipeline.frame
    def transform(frame: DataFrame) -> DataFrame:
        both = frame.unionByName(frame.withColumn("n", F.col("n") + 100)).select(*MESSAGE, "_key", "n", "sku")
        ranked = both.withColumn("rank", F.row_number().over(Window.partitionBy(*MESSAGE).orderBy("n")))
        return static(frame).join(ranked.join(by_message(both), MESSAGE), "sku", "right")

    assert pipeline.run(c, spark=spark, drain="20s").done == 12
    found = [message.payload for p in range(2) for message in c.read("out", p)]
    assert sorted((one["n"], one["rank"], one["most"], one["price"]) for one in found) == sorted(
        (n + 100 * high, 1 + high, n + 100, 1 + n % 2) for n in range(12) for high in range(2)
    )


@pytest.mark.parametrize("sink", ["topic", "files"])
def test_a_row_without_a_message_ends_the_pipeline_at_once(
    c: custody.Custody, spark: SparkSession, sink: str, tmp_path: Any
) -> None:
    """What a function of the user's makes is only known when it runs."""
    pipeline = Pipeline(source="in", group="g", sink="out" if sink == "topic" else Files(str(tmp_path)), schema=SCHEMA)

    def lose(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            batch["_partition"] = None
            yield batch

    pipeline.frame(lambda frame: frame.mapInPandas(lose, frame.schema))
    with pytest.raises(PipelineRefused, match="_partition or _offset is null"):
        pipeline.run(c, spark=spark, drain="20s")
    stats = c.stats("in", "g")
    assert (stats.dead, stats.in_flight, stats.waiting + stats.lag) == (0, 0, 12)


ONE_STAGE: dict[str, Frame] = {
    "columns": lambda f: f.withColumn("m", F.col("id") + 1).where("m > 3"),
    "explode": lambda f: f.withColumn("x", F.explode(F.array("id", "id"))),
    "a UDF": lambda f: f.withColumn("m", F.udf(lambda n: n, "long")("id")),
    "mapInArrow": lambda f: f.mapInArrow(same, "id long"),
    "a broadcast join": lambda f: f.join(F.broadcast(f.sparkSession.range(3)), "id", "left"),
}
MORE_STAGES: dict[str, Frame] = {
    "a sorted join": lambda f: f.join(f.sparkSession.range(3).hint("merge"), "id", "left"),
    "messages that are broadcast": lambda f: F.broadcast(f).join(f.sparkSession.range(8, numPartitions=8), "id"),
    "repartition": lambda f: f.repartition(8),
    "coalesce": lambda f: f.coalesce(2),
    "orderBy": lambda f: f.orderBy("id"),
    "groupBy": lambda f: f.groupBy("id").count(),
    "a union": lambda f: f.union(f),
}


@pytest.mark.req("S3")
def test_only_where_a_task_does_everything_for_its_messages_it_can_be_left_out(spark: SparkSession) -> None:
    messages = spark.range(1000, 1008, 1, 8)
    read = messages.mapInArrow(same, "id long")
    for name, frame in (ONE_STAGE | MORE_STAGES).items():
        staged = frame(read).select("id").mapInArrow(same, "id long")
        assert is_one_stage(staged, messages) == (name in ONE_STAGE), name
    assert not is_one_stage(read, spark.range(8, numPartitions=8)), "other rows"
    assert attempts(spark.sparkContext) == 4
