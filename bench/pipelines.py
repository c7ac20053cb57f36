"""Pipelines on Spark, beside plain Spark that runs the same handler over Parquet without a lifecycle."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import json as arrow_json
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import custody
from bench.report import Row, at_least
from bench.sizes import KEYS
from bench.stage import Connection, Stage
from custody.spark import Pipeline
from custody.spark.session import session

GROWING = 50_000
"""Messages that go through a pipeline before its batches have the size that is measured."""
WARM_UP = 2
"""Batches that are not counted: Java compiles, and workers start."""
FIELDS = "account string, amount double, country string, text string"
ORDERED = custody.Policy(ordering="key", max_attempts=3, backoff=custody.Constant("100ms"))


def rows(stage: Stage) -> Iterator[Row]:
    with stage.open() as (c, _):
        fill(c, 200)
        start = time.perf_counter()
        spark = session(config={"spark.ui.enabled": "false"})
        took = _first_commit(c, spark) - start
    try:
        yield Row(what="  from the start of Spark's JVM to the first commit of a pipeline", measured=took, unit="s")
        size = stage.sizes.spark_batch
        yield framed(stage, spark, size)
        yield from against_parquet(stage, spark, size)
        yield from sizes(stage, spark, size)
        yield from tiny_and_idle(stage, spark)
        yield from bad_row(stage, spark, size)
    finally:
        ended(spark)


def ended(spark: SparkSession) -> None:
    """Stops Spark and its JVM, so that the next one begins anew."""
    spark.stop()
    gateway = SparkContext._gateway
    if gateway is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(timeout=60)
        SparkContext._gateway = SparkContext._jvm = None


def screened(payload: dict[str, Any]) -> dict[str, Any]:
    """What the handler does to a message, in both."""
    return {**payload, "risk": payload["amount"] / 10_000, "blocked": payload["amount"] > 9_000}


def payload(number: int) -> dict[str, Any]:
    return {"account": f"ACC-{number % KEYS}", "amount": float(number % 10_000), "country": "SE", "text": "x" * 100}


def fill(c: custody.Custody, messages: int) -> None:
    for topic in ("in", "out"):
        c.create_topic(topic, partitions=4)
    for first in range(0, messages, 10_000):
        numbers = range(first, min(messages, first + 10_000))
        c.publish_many("in", [custody.Outgoing(payload(n), key=f"ACC-{n % KEYS}") for n in numbers])


def against_parquet(stage: Stage, spark: SparkSession, size: int) -> Iterator[Row]:
    batches = stage.sizes.spark_batches + WARM_UP
    _pipeline(stage, spark, size, WARM_UP)  # whoever comes first would pay for Java's compiling
    lifecycle = [size / took for took in _pipeline(stage, spark, size, batches)]
    plain = [size / took for took in _parquet(spark, size, batches)]
    yield Row(
        what=f"Spark pipeline, one output a message, batches of {size:,}",
        measured=median(lifecycle),
        unit="msg/s",
        target=at_least(60_000),
        beside="the handler in plain Spark over Parquet",
        other=median(plain),
        ratio=median(lifecycle) / median(plain),
        ratio_target=at_least(0.6),
    )
    yield from batched(stage, spark, size, lifecycle)
    failing = [size / took for took in _pipeline(stage, spark, size, batches, failing_keys=KEYS // 100)]
    yield Row(
        what="  with 1 % of the keys failing once on every message",
        measured=median(failing),
        unit="msg/s",
        beside="without failures",
        other=median(lifecycle),
        ratio=median(failing) / median(lifecycle),
    )


def batched(stage: Stage, spark: SparkSession, size: int, each: list[float]) -> Iterator[Row]:
    """A handler of whole batches, beside the same function in plain Spark, and beside the handler of single messages.
    Both parse the payload's fields and write the result as JSON."""
    batches = stage.sizes.spark_batches + WARM_UP
    with stage.open() as (c, _):
        fill(c, size * batches + GROWING)
        pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED, schema=FIELDS)
        pipeline.batch(screened_together)
        rates = [size / took for took in _run(pipeline, c, spark, size)[WARM_UP:]]
    plain = [size / took for took in _parquet(spark, size, batches, handled=_handled_together)]
    yield Row(
        what=f"  a handler of batches, one output a message, batches of {size:,}",
        measured=median(rates),
        unit="msg/s",
        beside="the same function in plain Spark over Parquet",
        other=median(plain),
        ratio=median(rates) / median(plain),
    )
    yield Row(
        what="  the same, beside the handler of single messages",
        measured=median(rates),
        unit="msg/s",
        beside="one message at a time",
        other=median(each),
        ratio=median(rates) / median(each),
    )


def screened_together(rows: pa.RecordBatch) -> pa.RecordBatch:
    """What `screened` does, to many messages at once."""
    amount = rows.column("amount")
    rows = rows.append_column("risk", pc.divide(amount, 10_000))
    return rows.append_column("blocked", pc.greater(amount, 9_000))


def framed(stage: Stage, spark: SparkSession, size: int) -> Row:
    """A frame with typed fields, which does what the handler does."""
    batches = stage.sizes.spark_batches + WARM_UP
    with stage.open() as (c, _):
        fill(c, size * batches + GROWING)
        pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED, schema=FIELDS)

        @pipeline.frame
        def transform(frame: DataFrame) -> DataFrame:
            return frame.withColumns({"risk": F.col("amount") / 10_000, "blocked": F.col("amount") > 9_000})

        rates = [size / took for took in _run(pipeline, c, spark, size)[WARM_UP:]]
    return Row(what=f"  a frame, one output a message, batches of {size:,}", measured=median(rates), unit="msg/s")


def _first_commit(c: custody.Custody, spark: SparkSession) -> float:
    """The time of the first commit of a pipeline."""
    commits: list[float] = []
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED)
    pipeline.each(handler(0))
    pipeline.run(c, spark=spark, available_now=True, on_batch=lambda _: commits.append(time.perf_counter()))
    return commits[0]


def sizes(stage: Stage, spark: SparkSession, size: int) -> Iterator[Row]:
    for other in (size // 10, size * 3):
        batches = max(2, stage.sizes.spark_batches * size // other // 3) + WARM_UP
        yield Row(
            what=f"  batches of {other:,}",
            measured=median(other / took for took in _pipeline(stage, spark, other, batches)),
            unit="msg/s",
        )


def tiny_and_idle(stage: Stage, spark: SparkSession) -> Iterator[Row]:
    tiny = list(_pipeline(stage, spark, 200, stage.sizes.spark_batches * 3 + WARM_UP))
    yield Row(what="  a batch of 200 messages", measured=median(tiny) * 1000, unit="ms")
    yield Row(
        what="  transactions of an idle pipeline",
        measured=_idle(stage, spark),
        unit="a second",  # one look, and whatever autovacuum and the measurement do
    )


def _idle(stage: Stage, spark: SparkSession, seconds: float = 10.0) -> float:
    with stage.open() as (c, connection):
        fill(c, 100)
        pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED)
        pipeline.each(handler(0))
        done, stop = threading.Event(), threading.Event()
        run = threading.Thread(
            target=pipeline.run, args=[c], kwargs={"spark": spark, "stop": stop, "on_batch": lambda _: done.set()}
        )
        run.start()
        try:
            done.wait(60)
            time.sleep(12)  # sessions hand in their counts ten seconds late
            before = _transactions(connection)
            time.sleep(seconds)
            return (_transactions(connection) - before) / seconds
        finally:
            stop.set()
            run.join()


def _transactions(connection: Connection) -> int:
    row = connection.execute(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    ).fetchone()
    assert row is not None
    return int(str(row[0]))


def bad_row(stage: Stage, spark: SparkSession, size: int) -> Iterator[Row]:
    """One message of a batch breaks a cast: what finding it costs."""
    took: dict[str, float] = {}
    for bad in (None, None, GROWING + size // 3):  # the first is the warm-up
        with stage.open() as (c, _):
            fill(c, 0)
            _publish_texts(c, size + GROWING, bad)
            pipeline = Pipeline(
                source="in",
                group="g",
                sink="out",
                policy=custody.Policy(ordering="key", max_attempts=1),
                schema="number int, text string",
            )

            @pipeline.frame
            def transform(frame: DataFrame) -> DataFrame:
                return frame.withColumn("value", F.col("text").cast("int"))

            took["clean" if bad is None else "bad"] = max(_run(pipeline, c, spark, size))
    yield Row(
        what=f"  one row in {size:,} that breaks a cast: its batch",
        measured=took["bad"],
        unit="s",
        beside="the same batch without it",
        other=took["clean"],
        ratio=took["bad"] / took["clean"],
    )


def _publish_texts(c: custody.Custody, size: int, bad: int | None) -> None:
    for first in range(0, size, 10_000):
        numbers = range(first, min(size, first + 10_000))
        messages = [{"number": n, "text": "1O0" if n == bad else str(n)} for n in numbers]
        c.publish_many("in", [custody.Outgoing(one, key=f"ACC-{one['number'] % KEYS}") for one in messages])


def _run(pipeline: Pipeline, c: custody.Custody, spark: SparkSession, size: int) -> list[float]:
    """Seconds from one commit to the next, for batches that are full: everything that one costs, claim and bookkeeping
    of Spark too. A pipeline begins with smaller ones."""
    commits: list[tuple[float, int]] = []
    pipeline.run(
        c,
        spark=spark,
        available_now=True,
        max_per_batch=size,
        on_batch=lambda batch: commits.append((time.perf_counter(), batch.committed.messages)),
    )
    return [after - before for (before, _), (after, messages) in itertools.pairwise(commits) if messages >= size]


def _pipeline(stage: Stage, spark: SparkSession, size: int, batches: int, *, failing_keys: int = 0) -> list[float]:
    with stage.open() as (c, _):
        fill(c, size * batches + GROWING)
        pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED)
        pipeline.each(handler(failing_keys))
        return _run(pipeline, c, spark, size)[WARM_UP:]


def handler(failing_keys: int) -> Callable[[custody.Message], Any]:
    failing = {f"ACC-{number}" for number in range(failing_keys)}

    def handle(message: custody.Message) -> Any:
        if message.attempt == 1 and message.key in failing:
            raise TimeoutError("no answer")
        return screened(message.payload)

    return handle


Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def _parquet(spark: SparkSession, size: int, batches: int, *, handled: Task | None = None) -> list[float]:
    """A stream from Parquet files to Parquet files: as many rows for each micro-batch, the same handler."""
    directory = Path(tempfile.mkdtemp(prefix="custody-bench-parquet-"))
    try:
        tasks = spark.sparkContext.defaultParallelism
        for number in range(batches * tasks):
            _write(directory / "in" / f"{number:05}.parquet", number * (size // tasks), size // tasks)
        source = spark.readStream.schema("key string, payload binary").option("maxFilesPerTrigger", tasks)
        ends: list[float] = []

        def note(frame: DataFrame, _: int) -> None:
            frame.write.mode("append").parquet(str(directory / "out"))
            ends.append(time.perf_counter())

        query = (
            source.parquet(str(directory / "in"))
            .mapInArrow(handled or _handled, "key string, payload binary")
            .writeStream.foreachBatch(note)
            .option("checkpointLocation", str(directory / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [after - before for before, after in itertools.pairwise(ends)][WARM_UP - 1 :]
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _write(path: Path, first: int, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = range(first, first + count)
    table = pa.table(
        {
            "key": pa.array([f"ACC-{n % KEYS}" for n in numbers]),
            "payload": pa.array([msgspec.json.encode(payload(n)) for n in numbers], pa.binary()),
        }
    )
    pq.write_table(table, path)


def _handled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    for batch in batches:
        found = [encode(screened(decode(one))) for one in batch.column("payload").to_pylist()]
        yield pa.RecordBatch.from_arrays([batch.column("key"), pa.array(found, pa.binary())], names=["key", "payload"])


def _handled_together(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """As many would write it: Arrow parses the payloads of a batch, and msgspec writes the rows of the result."""
    encode = msgspec.json.Encoder().encode
    for batch in batches:
        lines = pa.py_buffer(b"\n".join(batch.column("payload").to_pylist()))
        options = arrow_json.ReadOptions(use_threads=False, block_size=lines.size + 1)
        rows = arrow_json.read_json(pa.BufferReader(lines), options).combine_chunks().to_batches()[0]
        found = [encode(row) for row in screened_together(rows).to_pylist()]
        yield pa.RecordBatch.from_arrays([batch.column("key"), pa.array(found, pa.binary())], names=["key", "payload"])
