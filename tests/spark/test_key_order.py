"""Order of each key from topic to topic under random failures; and both kinds of pipeline agree on the same input."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.spark import verdict as verdicts
from tests.spark.verdict import SET, SOURCE, Verdict, chance, passed_on, policy, prepare, publish, verdict

import custody
from custody.spark import Pipeline, fail, fail_when

pytestmark = [pytest.mark.req("K10", "S4"), pytest.mark.timeout(600)]

for module in (sys.modules[__name__], verdicts):
    cloudpickle.register_pickle_by_value(module)  # workers cannot import tests

FAILING, HOPELESS = 60, 2
"""Of a thousand attempts so many fail, and of a thousand messages so many are dead at once."""


@pytest.fixture
def live(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the real clock."""
    with custody.connect(database_url) as opened:
        yield opened


def handled(message: custody.Message) -> object:
    seq = message.payload["seq"]
    if chance(message.key, seq, "dead") < HOPELESS:
        raise custody.Dead("hopeless")
    if chance(message.key, seq, message.attempt) < FAILING:
        raise ValueError(f"no luck in attempt {message.attempt}")
    return passed_on(message)


def framed(messages: DataFrame) -> DataFrame:
    """The same as a DataFrame."""

    def luck(last: object) -> F.Column:
        return F.crc32(F.concat_ws("/", "_key", F.col("seq").cast("string"), last).cast("binary")) % 1000

    attempt = F.col("_attempt").cast("string")
    marked = messages.transform(fail_when(luck(F.lit("dead")) < HOPELESS, "hopeless", dead=True)).transform(
        fail_when(luck(attempt) < FAILING, F.concat(F.lit("ValueError: no luck in attempt "), attempt))
    )
    return marked.withColumns(
        {
            "partition": F.col("_partition"),
            "offset": F.col("_offset"),
            "part": F.explode(F.array(*map(F.lit, range(SET)))),
        }
    )


def run(c: custody.Custody, spark: SparkSession, pipeline: Pipeline, max_per_batch: int) -> Verdict:
    # a lease that runs out on a busy machine counts an attempt, and then the two have different luck
    rules = policy(max_attempts=3, visibility_timeout="60s")
    prepare(c, rules, group=pipeline.group, sink=pipeline.sinks[0])
    pipeline.run(c, spark=spark, drain="120s", max_per_batch=max_per_batch)
    return verdict(c, group=pipeline.group, sink=pipeline.sinks[0])


def published(db: psycopg.Connection, sink: str) -> dict[str, list[str]]:
    """The payloads of each key, in their order."""
    found: dict[str, list[str]] = {}
    for key, payload in db.execute(
        'SELECT key, payload::jsonb::text FROM custody.events WHERE topic = %s ORDER BY partition, "offset"', [sink]
    ):
        found.setdefault(key, []).append(payload)
    return found


def batched(rows: pa.RecordBatch) -> pa.Table:
    """The same for a batch: those that fail break the call."""
    table = rows.select(["_key", "seq", "_attempt"]).to_pylist()
    hopeless = [chance(row["_key"], row["seq"], "dead") < HOPELESS for row in table]
    for row, none in zip(table, hopeless, strict=True):
        if not none and chance(row["_key"], row["seq"], row["_attempt"]) < FAILING:
            raise ValueError(f"no luck in attempt {row['_attempt']}")
    found = pa.Table.from_batches([rows.select(["_partition", "_offset", "seq"])])
    found = found.append_column("partition", found["_partition"]).append_column("offset", found["_offset"])
    parts = [found.append_column("part", pa.array([part] * found.num_rows)) for part in range(SET)]
    return pa.concat_tables([fail(one, hopeless, "hopeless", dead=True) for one in parts])


@pytest.mark.req("X8")
@pytest.mark.chaos
@pytest.mark.parametrize("messages", [1000, pytest.param(30_000, marks=pytest.mark.long)])
def test_each_and_batch_publish_the_same_in_order(
    live: custody.Custody, db: psycopg.Connection, spark: SparkSession, messages: int
) -> None:
    live.create_topic(SOURCE, partitions=2)
    publish(live, 0, messages, keys=100)
    one_by_one = Pipeline(source=SOURCE, group="each", sink="from-each")
    one_by_one.each(handled)
    together = Pipeline(source=SOURCE, group="batch", sink="from-batch", schema="seq int")
    together.batch(rows=150)(batched)
    each, batch = (run(live, spark, pipeline, messages // 2) for pipeline in (one_by_one, together))
    assert each.open == batch.open == 0
    assert each.dead == batch.dead
    assert each.done == batch.done
    assert published(db, "from-each") == published(db, "from-batch")
    assert batch.stages == 0


@pytest.mark.parametrize(
    "messages", [pytest.param(1000, marks=pytest.mark.chaos), pytest.param(30_000, marks=pytest.mark.long)]
)
def test_each_and_frame_publish_the_same_in_order(
    live: custody.Custody, db: psycopg.Connection, spark: SparkSession, messages: int
) -> None:
    live.create_topic(SOURCE, partitions=2)
    publish(live, 0, messages, keys=100)
    one_by_one = Pipeline(source=SOURCE, group="each", sink="from-each")
    one_by_one.each(handled)
    at_once = Pipeline(source=SOURCE, group="frame", sink="from-frame", schema="seq int")
    at_once.frame(framed)
    each, frame = (run(live, spark, pipeline, messages // 2) for pipeline in (one_by_one, at_once))
    assert each.open == frame.open == 0
    assert each.dead == frame.dead
    assert any("hopeless" in (error or "") for error in each.dead.values())
    assert any("no luck in attempt 3" in (error or "") for error in each.dead.values()) or messages < 10_000
    assert each.done == frame.done
    assert published(db, "from-each") == published(db, "from-frame")
    assert each.stages == 0, "all stages are cleared away"
