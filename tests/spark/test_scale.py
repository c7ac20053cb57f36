"""Many partitions and large batches: shares for tasks keep the order of each key, and connections stay few."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from pyspark import TaskContext
from pyspark.sql import SparkSession

import custody
from custody.spark import Pipeline

pytestmark = [pytest.mark.req("S5"), pytest.mark.timeout(900)]

KEYS = 1000
ORDERED = custody.Policy(ordering="key", max_attempts=2, backoff=custody.Constant("20ms"))


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    with custody.connect(database_url) as opened:
        yield opened


def fill(c: custody.Custody, partitions: int, messages: int) -> None:
    c.create_topic("in", partitions=partitions)
    c.create_topic("out", partitions=8)
    for first in range(0, messages, 10_000):
        numbers = range(first, min(messages, first + 10_000))
        c.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n % KEYS}") for n in numbers])


def passed_on(message: custody.Message) -> object:
    n = message.payload["n"]
    if n % 997 == 0 and message.attempt == 1:
        raise TimeoutError("not yet")
    return {"n": n}


def assert_all_once_in_key_order(db: psycopg.Connection[Any], messages: int) -> None:
    found = db.execute(
        """
        SELECT count(*), count(DISTINCT n), count(*) FILTER (WHERE n < before) FROM (
            SELECT n, lag(n) OVER (PARTITION BY key ORDER BY "offset") AS before
            FROM (SELECT key, "offset", (payload::jsonb ->> 'n')::int AS n FROM custody.events WHERE topic = 'out') e) o
        """
    ).fetchone()
    assert found == (messages, messages, 0), "outputs, different ones, out of order"


class Connections:
    """The most connections to a database while something runs, but for those that were there before."""

    def __init__(self, db: psycopg.Connection[Any]) -> None:
        self._db, self._over, self.most = db, threading.Event(), 0
        self._before = self._now()

    def _now(self) -> int:
        row = self._db.execute("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()").fetchone()
        assert row is not None
        return int(row[0])

    def __enter__(self) -> Connections:
        self._watch = threading.Thread(target=self._watching)
        self._watch.start()
        return self

    def _watching(self) -> None:
        while not self._over.wait(0.05):
            self.most = max(self.most, self._now() - self._before)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()


@pytest.mark.parametrize(
    ("messages", "size"), [(3_200, 1_600), pytest.param(1_000_000, 500_000, marks=pytest.mark.long)]
)
def test_many_partitions_in_large_batches(
    c: custody.Custody, db: psycopg.Connection, spark: SparkSession, messages: int, size: int
) -> None:
    fill(c, 64, messages)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED)
    pipeline.each(passed_on)
    sizes: list[int] = []
    with Connections(db) as connections:
        summary = pipeline.run(
            c,
            spark=spark,
            drain="60s",
            max_per_batch=size,
            batch_time="120s",
            on_batch=lambda batch: sizes.append(batch.committed.messages),
        )
    assert (summary.done, summary.dead, summary.failed) == (messages, 0, len(range(0, messages, 997)))
    assert max(sizes) > size / 4, "batches grow"
    assert_all_once_in_key_order(db, messages)
    # the driver's pool and its source's with their listeners; each of two Python workers reads and writes, and looks
    # once whether a pooler is in between
    assert 0 < connections.most <= 20, "as many as tasks need, not partitions"


def test_one_partition_is_split_by_key(c: custody.Custody, db: psycopg.Connection, spark: SparkSession) -> None:
    def tell_task(message: custody.Message) -> object:
        context = TaskContext.get()
        assert context is not None
        return {"n": message.payload["n"], "task": context.partitionId()}

    fill(c, 1, 3_000)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=ORDERED)
    pipeline.each(tell_task)
    pipeline.run(c, spark=spark, drain="60s", batch_time="10m")  # batches of 500, 2,000 and 500 however busy it is here
    assert_all_once_in_key_order(db, 3_000)
    shares = db.execute(
        "SELECT payload::jsonb ->> 'task', count(*) FROM custody.events WHERE topic = 'out' GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert [task for task, _ in shares] == ["0", "1"]
    assert min(count for _, count in shares) > 900, "about half of the second batch; the others are too small"
