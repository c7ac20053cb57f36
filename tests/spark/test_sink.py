"""`write` and `writeStream` with `format("custody")`: once or not at all, whatever fails, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col
from pyspark.sql.types import StructType
from tests.spark.test_source import assert_hidden, with_password

from custody import Custody, CustodyError, Outgoing
from custody.errors import InvalidArgument, InvalidPayload, KeySplit, PartitionNotFound, TopicChanged, TopicNotFound
from custody.model.placement import partition_for
from custody.spark.database import sinks
from custody.spark.format import sink
from custody.spark.format.sink import Attempt, Target

pytestmark = pytest.mark.req("S1")

ROW = "key string, payload string"
Message = tuple[str | None, Any, dict[str, str]]


@pytest.fixture
def orders(c: Custody, db: psycopg.Connection) -> Iterator[Custody]:
    """Two topics; whatever a test does to them, no stage is left at its end."""
    c.create_topic("orders", partitions=3)
    c.create_topic("audit")
    yield c
    assert db.execute("SELECT relname FROM pg_class WHERE relname LIKE 'staged%'").fetchall() == []
    assert db.execute("SELECT name FROM custody.stages").fetchall() == []


def append(frame: DataFrame, url: str, **options: Any) -> None:
    frame.write.format("custody").options(url=url, **options).mode("append").save()


def published(c: Custody, topic: str = "orders") -> list[list[Message]]:
    """Key, payload and headers of every message, by partition."""
    count = c.topic(topic).partitions
    return [[(m.key, m.payload, dict(m.headers)) for m in c.read(topic, p, max_messages=10_000)] for p in range(count)]


def payloads(c: Custody, topic: str = "orders") -> list[Any]:
    return [payload for messages in published(c, topic) for _, payload, _ in messages]


# a DataFrame


def test_what_is_written_comes_back(
    spark: SparkSession, orders: Custody, database_url: str, db: psycopg.Connection
) -> None:
    rows = [
        ("a", b'{"n": 1}', "json", {"trace": "x", "von": "Zoë"}, None, None),
        ("a", b"plain", "text", None, None, None),
        ("b", b"\x00\xff", None, {}, None, None),
        ("a", b"elsewhere", "text", None, 2, None),
        (None, b"null", "json", None, 0, "audit"),
    ]
    written = spark.createDataFrame(
        rows, "key string, payload binary, payload_kind string, headers map<string,string>, partition int, topic string"
    ).coalesce(1)
    db.execute("LISTEN custody")
    append(written, database_url, topic="orders")
    assert {hint.payload for hint in db.notifies(timeout=5, stop_after=2)} == {"orders", "audit"}
    twin = [Outgoing({"n": 1}, key="a", headers={"trace": "x", "von": "Zoë"}), Outgoing("plain", key="a")]
    twin += [Outgoing(b"\x00\xff", key="b"), Outgoing("elsewhere", key="a", partition=2)]
    orders.create_topic("twin", partitions=3)
    orders.publish_many("twin", twin)
    assert published(orders) == published(orders, "twin")
    assert published(orders, "audit") == [[(None, None, {})]]
    # and what the source reads can be written again, without what only the log can say
    again = spark.read.format("custody").options(url=database_url, topic="orders").load()
    append(again.drop("offset", "published_at", "topic"), database_url, topic="orders")
    assert [len(messages) for messages in published(orders)] == [2 * len(m) for m in published(orders, "twin")]


def test_text_is_json_unless_it_is_said_to_be_text(spark: SparkSession, orders: Custody, database_url: str) -> None:
    frame = spark.createDataFrame([("k", "[1, 2]")], ROW)
    append(frame, database_url, topic="orders")
    append(frame, database_url, topic="orders", payloadKind="text")
    append(frame.filter("false"), database_url, topic="orders")
    assert payloads(orders) == [[1, 2], "[1, 2]"]


def test_a_task_that_fails_and_is_tried_again_publishes_once(
    spark: SparkSession, orders: Custody, database_url: str, tmp_path: Path
) -> None:
    marker = tmp_path / "failed"

    def fail_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch
            if 7 in batch.column("id").to_pylist() and not marker.exists():
                marker.touch()
                raise RuntimeError("at the first attempt")

    frame = spark.range(10, numPartitions=2).mapInArrow(fail_once, "id long")
    append(frame.select(col("id").cast("string").alias("payload")), database_url, topic="orders")
    assert marker.exists()
    assert sorted(payloads(orders)) == list(range(10))


def test_mistakes_are_named_before_anything_runs(spark: SparkSession, orders: Custody, database_url: str) -> None:
    frame = spark.createDataFrame([("k", "1")], ROW)
    with pytest.raises(AnalysisException, match="Did you mean 'headers'"):
        append(frame.selectExpr("*", "'x' AS headrs"), database_url, topic="orders")
    with pytest.raises(AnalysisException, match="there is no topic 'nope'"):
        append(frame, database_url, topic="nope")
    with pytest.raises(AnalysisException, match="a topic cannot be overwritten"):
        frame.write.format("custody").options(url=database_url, topic="orders").mode("overwrite").save()
    assert payloads(orders) == []


def test_a_bad_row_leaves_nothing_of_the_whole_write(spark: SparkSession, orders: Custody, database_url: str) -> None:
    rows = [("good", "1"), ("worse", "{")]
    with pytest.raises(Exception, match="the payload of the row with the key 'worse' is not json"):
        append(spark.createDataFrame(rows, ROW).repartitionByRange(2, "key"), database_url, topic="orders")
    assert payloads(orders) == []


def test_a_full_topic_takes_all_or_nothing(spark: SparkSession, orders: Custody, database_url: str) -> None:
    orders.create_topic("small", max_depth=5)
    orders.create_group("small", "readers", start="earliest")
    frame = spark.range(6).select(col("id").cast("string").alias("payload"))
    with pytest.raises(Exception, match="QueueFull"):
        append(frame, database_url, topic="small")
    assert payloads(orders, "small") == []
    append(frame.limit(5), database_url, topic="small")
    assert len(payloads(orders, "small")) == 5


# a stream


def run_once(spark: SparkSession, url: str, checkpoint: Path, topic: str = "orders") -> None:
    """Everything that is in `incoming` now, two messages for each batch."""
    stream = spark.readStream.format("custody").options(url=url, topic="incoming", maxRowsPerTrigger=2).load()
    query = (
        stream.drop("offset", "published_at", "topic")
        .writeStream.format("custody")
        .options(url=url, topic=topic, checkpointLocation=str(checkpoint), allowSplit=True)
        .trigger(availableNow=True)
        .start()
    )
    try:
        assert query.awaitTermination(60)
    finally:
        query.stop()


def test_a_replayed_batch_is_published_once(
    spark: SparkSession, orders: Custody, database_url: str, db: psycopg.Connection, tmp_path: Path
) -> None:
    url, checkpoint = with_password(database_url), tmp_path / "checkpoint"
    orders.create_topic("incoming")
    orders.publish_many("incoming", [Outgoing(n, key="k") for n in range(4)])
    run_once(spark, url, checkpoint)
    assert payloads(orders) == [0, 1, 2, 3]
    batches = db.execute("SELECT batch_id, messages FROM custody.sink_batches ORDER BY batch_id").fetchall()
    assert batches == [(0, 2), (1, 2)]
    # as if the driver had died after the sink's commit, and before its own
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    orders.publish("incoming", 4, key="k")
    run_once(spark, url, checkpoint)
    assert payloads(orders) == [0, 1, 2, 3, 4]
    assert_hidden(url, "", checkpoint)
    shutil.rmtree(checkpoint)
    run_once(spark, url, checkpoint)
    assert payloads(orders) == [0, 1, 2, 3, 4] * 2


@pytest.mark.chaos
def test_a_stream_that_failed_goes_on_where_it_was(
    spark: SparkSession, orders: Custody, database_url: str, tmp_path: Path
) -> None:
    orders.create_topic("incoming")
    orders.publish_many("incoming", [Outgoing(n, key="k") for n in range(3)])
    with pytest.raises(StreamingQueryException, match="there is no topic 'later'"):
        run_once(spark, database_url, tmp_path / "checkpoint", topic="later")
    orders.create_topic("later", max_depth=2)
    orders.create_group("later", "readers", start="earliest")
    with pytest.raises(StreamingQueryException, match="QueueFull"):
        run_once(spark, database_url, tmp_path / "checkpoint", topic="later")
    assert payloads(orders, "later") == [0, 1]
    lease = orders.claim("later", "readers", max_messages=2)
    lease.ack(lease.messages)
    run_once(spark, database_url, tmp_path / "checkpoint", topic="later")
    assert payloads(orders, "later") == [0, 1, 2]


# what a task and a commit do, without Spark between them


def target(url: str, schema: str = ROW, **options: str) -> Target:
    return Target.parse({"url": url, **options}, StructType.fromDDL(schema))


def batch(*rows: tuple[Any, ...], of: str = ROW) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(values) for values in zip(*rows, strict=True)], StructType.fromDDL(of).names
    )


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (ROW, {"topik": "orders"}, "Did you mean 'topic'"),
        (ROW, {}, "there is neither an option nor a column topic"),
        (ROW, {"topic": "orders", "payloadKind": "jsonb"}, "Did you mean 'json'"),
        (f"{ROW}, amount int", {"topic": "orders"}, r"drop\(\) the rest"),
        (f"{ROW}, offset long", {"topic": "orders"}, r"\.drop\('offset'\)"),
        (f"{ROW}, key string", {"topic": "orders"}, "there are two columns 'key'"),
        (f"{ROW}, headers map<string,int>", {"topic": "orders"}, "cast\\('map<string,string>'\\)"),
        ("key string", {"topic": "orders"}, "there is no column payload"),
        ("key int, payload string", {"topic": "orders"}, "the column key is int, not string"),
        ("payload struct<n int>", {"topic": "orders"}, "to_json"),
        ("payload int", {"topic": "orders"}, r"cast\('string'\)"),
    ],
)
def test_columns_and_options_that_do_not_fit(schema: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        target("postgresql://nowhere/", schema, **options)


def test_attempts_that_staged_and_do_not_count_are_not_published(
    orders: Custody, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink, "FLUSH", 1)  # stages every batch at once
    to = target(database_url, topic="orders")
    rows = [[("k", json.dumps(n)), ("other", "0")] for n in range(5)]

    def dies() -> Iterator[pa.RecordBatch]:
        yield batch(*rows[0])
        raise OSError("as a lost executor")

    with pytest.raises(OSError, match="lost executor"):
        Attempt(to, "staged_sink_x").run(dies())
    Attempt(to, "staged_sink_x").run(batch(*two) for two in rows)  # a speculative one, which came second
    counts = Attempt(to, "staged_sink_x").run(batch(*two) for two in rows)
    assert sinks.commit(database_url, "staged_sink_x", counts, query="q", batch=7) == 10
    assert [m.payload for p in range(3) for m in orders.read("orders", p) if m.key == "k"] == [0, 1, 2, 3, 4]
    # a replay, even with other messages; and a batch that comes after it
    for number, result in ((7, None), (8, 1)):
        counts = Attempt(to, "staged_sink_y").run(iter([batch(("new", "1"))]))
        assert sinks.commit(database_url, "staged_sink_y", counts, query="q", batch=number) == result
    assert len(payloads(orders)) == 11


def test_all_messages_of_a_partition_have_the_time_of_the_commit(orders: Custody, database_url: str) -> None:
    to = target(database_url, topic="orders")
    counts = [
        place for _ in range(4) for place in Attempt(to, "staged_sink_x").run(iter([batch(("k", "1"), ("k", "2"))]))
    ]
    sinks.commit(database_url, "staged_sink_x", counts)
    assert len({m.published_at for p in range(3) for m in orders.read("orders", p)}) == 1


def test_a_topic_made_anew_meanwhile_is_refused(orders: Custody, database_url: str) -> None:
    counts = Attempt(target(database_url, topic="audit"), "staged_sink_x").run(iter([batch(("k", "1"))]))
    orders.delete_topic("audit")
    orders.create_topic("audit")
    with pytest.raises(TopicChanged):
        sinks.commit(database_url, "staged_sink_x", counts, query="q", batch=0)
    sinks.drop_stage(database_url, "staged_sink_x")
    assert payloads(orders, "audit") == []


WIDE = "payload string, payload_kind string, topic string, partition int, headers map<string,string>"


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ((None, None, "orders", 0, None), InvalidPayload, "a row without a key has no payload"),
        (("NaN", None, "orders", 0, None), InvalidPayload, "is not json"),
        (("1", "jsn", "orders", 0, None), InvalidArgument, "Did you mean 'json'"),
        (("1", None, None, 0, None), InvalidArgument, "has no topic"),
        (("1", None, "nope", 0, None), TopicNotFound, "there is no topic 'nope'"),
        (("1", None, "orders", 3, None), PartitionNotFound, "It has 3, numbered from 0"),
        (("1", None, "orders", 0, [("h", None)]), InvalidPayload, "header 'h' is None"),
    ],
)
def test_bad_rows_are_named(
    orders: Custody, database_url: str, row: tuple[Any, ...], error: type[CustodyError], message: str
) -> None:
    kinds = [pa.string(), pa.string(), pa.string(), pa.int32(), pa.map_(pa.string(), pa.string())]
    columns = [pa.array([value], kind) for value, kind in zip(row, kinds, strict=True)]
    rows = pa.RecordBatch.from_arrays(columns, StructType.fromDDL(WIDE).names)
    with pytest.raises(error, match=message):
        Attempt(target(database_url, WIDE), "staged_sink_x").run(iter([rows]))


KEYED = "key string, payload string, partition int"


@pytest.mark.req("K2")
def test_a_key_stays_whole_unless_an_option_lets_it_be_split(orders: Custody, database_url: str) -> None:
    own = partition_for("k", 3)
    columns = [pa.array(["k"]), pa.array(["1"]), pa.array([(own + 1) % 3], pa.int32())]
    rows = pa.RecordBatch.from_arrays(columns, StructType.fromDDL(KEYED).names)
    with pytest.raises(KeySplit, match=f"'k' belongs to partition {own}"):
        Attempt(target(database_url, KEYED, topic="orders"), "staged_sink_x").run(iter([rows]))
    placed = Attempt(target(database_url, KEYED, topic="orders", allowSplit="true"), "staged_sink_x").run(iter([rows]))
    assert [place.partition for place in placed] == [(own + 1) % 3]
    with pytest.raises(InvalidArgument, match="allowSplit cannot be 'yes'"):
        target(database_url, KEYED, topic="orders", allowSplit="yes")
    sinks.drop_stage(database_url, "staged_sink_x")


FRESH = """
import sys
from pathlib import Path
from pyspark.sql.functions import lit
from custody.spark.session import session

here = Path.cwd()
(here / "events").mkdir()
log = {"spark.eventLog.enabled": "true", "spark.eventLog.dir": (here / "events").as_uri(), "spark.ui.enabled": "false"}
spark = session(master="local[2,4]", config=log)
to = {"url": sys.argv[1], "topic": "orders"}
spark.range(3).select(lit("1").alias("payload")).write.format("custody").options(**to).mode("append").save()
stream = spark.readStream.format("custody").options(**to).load().drop("offset", "published_at", "topic")
sink = stream.writeStream.format("custody").options(**to, checkpointLocation=str(here / "checkpoint"))
query = sink.trigger(availableNow=True).start()
query.awaitTermination()
query.explain(True)
spark.stop()
"""


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
    assert payloads(orders) == [1] * 6
    assert any((tmp_path / "events").iterdir())
    assert_hidden(url, run.stdout + run.stderr, tmp_path)
