"""`format("custody")` in a real Spark: filters, read limits, checkpoints, views, and what it must not show."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, from_json, lit, struct
from tests.conftest import Clock
from tests.waiting import wait_for

from custody import Custody, Outgoing

pytestmark = pytest.mark.req("S1")

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def no_pushdown(spark: SparkSession) -> Iterator[None]:
    """A session that was not made by Custody pushes no filter to Python unless it is told to."""
    spark.conf.set(PUSHDOWN, "false")
    yield
    spark.conf.set(PUSHDOWN, "true")


@pytest.fixture
def orders(c: Custody, clock: Clock) -> Custody:
    """Two partitions with a hundred messages each, a minute between one ten and the next."""
    c.create_topic("orders", partitions=2)
    for ten in range(10):
        numbers = range(ten * 20, ten * 20 + 20)
        c.publish_many(
            "orders", [Outgoing({"n": n}, partition=n % 2, key=f"k{n % 6}", allow_split=True) for n in numbers]
        )
        clock.move(60)
    return c


def load(spark: SparkSession, url: str, **options: Any) -> DataFrame:
    return spark.read.format("custody").options(url=url, topic="orders", **options).load()


def with_password(url: str) -> str:
    """The embedded server asks for no password, and takes any; another one's URL has its own."""
    return url if "CUSTODY_TEST_DATABASE" in os.environ else url.replace("@", ":open-sesame@", 1)


def assert_hidden(url: str, shown: str, directory: Path) -> None:
    """The password of the URL is neither in a text nor in any file below a directory."""
    secret = str(conninfo_to_dict(url).get("password") or "")
    if secret:
        assert secret not in shown
        written = [path for path in directory.rglob("*") if path.is_file()]
        assert written
        assert [path for path in written if secret.encode() in path.read_bytes()] == []


def run_once(spark: SparkSession, url: str, checkpoint: Path, each: Any, **options: Any) -> None:
    """Everything that is there now, batch by batch."""
    stream = spark.readStream.format("custody").options(url=url, topic="orders", **options).load()
    query = (
        stream.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(60)
    finally:
        query.stop()


def test_a_batch_with_its_columns_and_filters(
    spark: SparkSession, no_pushdown: None, orders: Custody, database_url: str, clock: Clock
) -> None:
    events = load(spark, database_url, startingOffsets='{"0": 10, "1": 90}')
    number = from_json(col("payload").cast("string"), "n int").n
    wanted = events.filter(
        (col("partition") == 0)
        & (col("offset") >= 20)
        & (col("offset") < lit(90))
        & col("key").isin("k0", "k4")
        & (col("published_at") < lit(orders.read("orders", 0, offset=60, max_messages=1)[0].published_at))
    ).select("topic", "offset", "key", "payload_kind", number.alias("n"), "published_at")
    expected = [
        ("orders", m.offset, m.key, "json", m.payload["n"])
        for m in orders.read("orders", 0, offset=20, max_messages=40)
        if m.key in ("k0", "k4")
    ]
    # Spark filters by itself where it is not allowed to push; the result is the same
    assert [tuple(row)[:5] for row in wanted.collect()] == expected
    assert "Filter" in _plan(wanted)


def test_filters_are_pushed_and_fewer_rows_are_read(spark: SparkSession, orders: Custody, database_url: str) -> None:
    wanted = load(spark, database_url).filter("partition = 1 AND offset > 40 AND key IN ('k1', 'k3')")
    rows = wanted.collect()
    expected = [m.offset for m in orders.read("orders", 1, offset=41) if m.key in ("k1", "k3")]
    assert [row.offset for row in rows] == expected
    # what is pushed leaves no trace in the plan: the scan gives nothing but what was wanted
    assert "Filter" not in _plan(wanted)
    assert _rows_read(wanted) == len(expected)


def _plan(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString()).replace("RuntimeFilters", "")


def _rows_read(frame: DataFrame) -> int:
    """What the scan has yielded when this frame was collected."""
    plan = frame._jdf.queryExecution().executedPlan()
    while plan.children().size():
        plan = plan.children().head()
    return int(plan.metrics().apply("numOutputRows").value())


def test_a_stream_reads_each_message_once_whatever_is_published_meanwhile(
    spark: SparkSession, c: Custody, database_url: str, tmp_path: Path
) -> None:
    c.create_topic("orders", partitions=2)
    url, checkpoint = with_password(database_url), tmp_path / "checkpoint"
    batches: list[list[tuple[int, int]]] = []

    def collect(frame: DataFrame, _: int) -> None:
        batches.append([(row.partition, row.offset) for row in frame.select("partition", "offset").collect()])
        if len(batches) == 2:
            c.publish_many("orders", [Outgoing(n, partition=n % 2) for n in range(10)])

    run_once(spark, url, checkpoint, collect)
    assert sum(map(len, batches)) == 0  # nothing was there yet
    batches.clear()
    c.publish_many("orders", [Outgoing(n, partition=n % 2) for n in range(100)])
    run_once(spark, url, checkpoint, collect, maxRowsPerTrigger=40)
    assert [len(batch) for batch in batches] == [40, 40, 20]
    run_once(spark, url, checkpoint, collect)  # a restart goes on where the checkpoint is
    assert [len(batch) for batch in batches[3:]] == [10]
    every = [place for batch in batches for place in batch]
    assert sorted(every) == [(partition, offset) for partition in (0, 1) for offset in range(55)]
    assert_hidden(url, "", checkpoint)


def test_a_running_stream_takes_what_comes(spark: SparkSession, orders: Custody, database_url: str) -> None:
    stream = spark.readStream.format("custody").options(url=database_url, topic="orders", startingOffsets="latest")
    query = stream.load().writeStream.format("memory").queryName("arriving").start()
    try:
        wait_for(lambda: query.lastProgress, "no first batch", timeout=60)
        orders.publish("orders", "late", key="k")
        wait_for(
            lambda: spark.table("arriving").count() or query.exception(), lambda: f"nothing came: {query.status}", 60
        )
        assert [row.payload for row in spark.table("arriving").collect()] == [b"late"]
    finally:
        query.stop()


def test_views(spark: SparkSession, orders: Custody, database_url: str) -> None:
    orders.create_group("orders", "stock")
    lease = orders.claim("orders", "stock", max_messages=3)
    lease.nack(lease.messages[0], error="broken", requeue=False)
    dead, journal, deliveries = (
        load(spark, database_url, table=table, group="stock") for table in ("dead_letters", "journal", "deliveries")
    )
    every = dead.select("offset", "last_error", struct("headers", "errors").alias("more")).crossJoin(
        journal.filter("kind = 'claim'").select("offsets", "lease_id")
    )
    row = every.collect()[0]
    assert (row.offset, row.last_error, row.offsets, row.lease_id) == (0, "broken", "{[0,3)}", str(lease.lease_id))
    assert (row.more.headers, row.more.errors) == ({}, ["attempt 1: broken"])
    assert {(r.status, r["count"]) for r in deliveries.groupBy("status").count().collect()} == {
        ("dead", 1),
        ("processing", 2),
    }


def test_mistakes_are_named(spark: SparkSession, orders: Custody, database_url: str) -> None:
    with pytest.raises(AnalysisException, match="Did you mean 'startingOffsets'"):
        load(spark, database_url, startingOffset="earliest")
    with pytest.raises(AnalysisException, match="there is no topic 'nope'"):
        spark.read.format("custody").options(url=database_url, topic="nope").load().collect()


FRESH = """
import sys
from pathlib import Path
from custody.spark.session import session

here = Path.cwd()
(here / "events").mkdir()
log = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": (here / "events").as_uri(), "spark.ui.enabled": "false"}
spark = session(master="local[2,4]", config=log)
batch = spark.read.format("custody").options(url=sys.argv[1], topic="orders").load()
print("rows", len(batch.collect()))
batch.explain(True)
stream = spark.readStream.format("custody").options(url=sys.argv[1], topic="orders").load()
stream.explain(True)
query = (
    stream.writeStream.format("noop").option("checkpointLocation", str(here / "checkpoint")).trigger(availableNow=True)
).start()
query.awaitTermination()
query.explain(True)
print("streamed", sum(progress["numInputRows"] for progress in query.recentProgress))
spark.stop()
"""


def test_planning_loads_no_pandas() -> None:
    """Spark starts a process for each step of a plan, and each would spend half of its time on it."""
    program = "import sys, pyspark_custody; print({'pandas', 'pyarrow.dataset'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "set()\n"


@pytest.mark.slow
def test_a_fresh_process_needs_no_registration_and_shows_no_password(
    orders: Custody, database_url: str, tmp_path: Path
) -> None:
    url = with_password(database_url)
    run = subprocess.run(
        [sys.executable, "-c", FRESH, url],
        cwd=tmp_path,
        env={**os.environ, "SPARK_LOCAL_DIRS": str(tmp_path / "local")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    for line in ("rows 200", "streamed 200"):
        assert line in run.stdout.splitlines(), run.stdout
    assert "*(redacted)" in run.stdout
    assert any((tmp_path / "events").iterdir())
    assert any((tmp_path / "checkpoint").iterdir())
    assert_hidden(url, run.stdout + run.stderr, tmp_path)
