"""How a pipeline grows with messages, partitions and tasks, and what one more worker process of a cluster brings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event

from pyspark import cloudpickle
from pyspark.sql import SparkSession
from tests.spark.cluster import HOSTS, cluster

import custody
from bench import pipelines
from bench.pipelines import ORDERED, ended, handler, payload
from bench.report import Row
from bench.sizes import KEYS
from bench.stage import Stage
from custody.spark import Batch, Pipeline
from custody.spark.session import session


def rows(stage: Stage) -> Iterator[Row]:
    most = stage.sizes.spark_scale
    with stage.open() as (c, _):
        c.create_topic("out", partitions=4)
        with _session("local[2,4]") as spark:
            rate = _runs(c, spark)
            rate("in-16", most // 10, most // 10)  # Java compiles, and workers start
            for messages in (most // 4, most // 2, most):
                yield Row(
                    what=f"Spark pipeline over {messages:,} messages, 16 partitions, batches of {most // 10:,}",
                    measured=rate("in-16", messages, most // 10),
                    unit="msg/s",
                )
            for partitions in (1, 4, 64):
                yield Row(
                    what=f"  {most // 2:,} messages in {partitions} partition{'s' if partitions > 1 else ''}",
                    measured=rate(f"in-{partitions}", most // 2, most // 10),
                    unit="msg/s",
                )
            yield Row(
                what=f"  {most:,} messages, 64 partitions, batches of {most // 2:,}",
                measured=rate("in-64", most, most // 2),
                unit="msg/s",
            )
        for tasks in (1, 4):
            with _session(f"local[{tasks},4]") as spark:
                rate = _runs(c, spark)
                rate("in-16", most // 10, most // 10)
                yield Row(
                    what=f"  {most // 2:,} messages with {tasks} task{'s' if tasks > 1 else ''} at a time (above: 2)",
                    measured=rate("in-16", most // 2, most // 10),
                    unit="msg/s",
                )
        yield from _workers(c, most)


def _workers(c: custody.Custody, most: int) -> Iterator[Row]:
    """A standalone cluster whose workers have one core each."""
    cloudpickle.register_pickle_by_value(pipelines)  # type: ignore[no-untyped-call]  # executors cannot import it
    alone = None
    for workers in (1, 2):
        with (
            TemporaryDirectory(prefix="custody-bench-cluster-") as place,
            cluster(Path(place), HOSTS[:workers]) as spark_cluster,
            _session(spark_cluster.url) as spark,
        ):
            rate = _runs(c, spark)
            rate("in-16", most // 10, most // 10)
            measured = rate("in-16", most // 2, most // 10)
        yield Row(
            what=f"  {most // 2:,} messages on a cluster of {workers} worker{'s' if workers > 1 else ''} with one core",
            measured=measured,
            unit="msg/s",
            beside=None if alone is None else "one worker",
            other=alone,
            ratio=None if alone is None else measured / alone,
        )
        alone = measured


@contextmanager
def _session(master: str) -> Iterator[SparkSession]:
    settings = {
        "spark.ui.enabled": "false",
        "spark.executor.memory": "700m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    spark = session(master=master, config=settings)
    try:
        yield spark
    finally:
        ended(spark)


def _runs(c: custody.Custody, spark: SparkSession) -> Callable[[str, int, int], float]:
    """Measures messages a second, from the first commit to the last. Every run is a group of its own."""

    def rate(topic: str, messages: int, size: int) -> float:
        _filled(c, topic, messages)
        before = {group.name for group in c.groups(topic)}
        pipeline = Pipeline(source=topic, group=f"g{len(before)}", sink="out", policy=ORDERED, start="earliest")
        pipeline.each(handler(0))
        commits: list[tuple[float, int]] = []
        stop = Event()

        def note(batch: Batch) -> None:
            commits.append((time.perf_counter(), batch.committed.messages))
            if sum(done for _, done in commits) >= messages:
                stop.set()

        pipeline.run(c, spark=spark, available_now=True, max_per_batch=size, on_batch=note, stop=stop)
        done = sum(count for _, count in commits[1:])
        return done / (commits[-1][0] - commits[0][0])

    return rate


def _filled(c: custody.Custody, topic: str, messages: int) -> None:
    """As many messages as are wanted; what is there already stays."""
    if topic not in {one.name for one in c.topics()}:
        c.create_topic(topic, partitions=int(topic.removeprefix("in-")))
    there = c.topic(topic).message_count
    for first in range(there, messages, 10_000):
        numbers = range(first, min(messages, first + 10_000))
        c.publish_many(topic, [custody.Outgoing(payload(n), key=f"ACC-{n % KEYS}") for n in numbers])
