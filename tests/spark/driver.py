"""A pipeline's driver in a process of its own, which waits or dies at the step that it is told.

It starts its JVM and says so. Then it reads its orders, one line of JSON; what it says are lines of JSON too. Settings
of Spark may be given as an argument: without them it runs on this machine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from pyspark import SparkContext, cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.spark import holding, steps, verdict
from tests.spark.verdict import GROUP, ROW, SET, SINK, SOURCE, chance, passed_on

import custody
from custody.errors import CustodyError
from custody.spark import Delta, Files, Iceberg, Jdbc, KeyState, Pipeline, fail, fail_when
from custody.spark.outside.sinks import Outside
from custody.spark.session import session


def say(**what: Any) -> None:
    print(json.dumps(what, default=str), flush=True)


def do(step: str, deed: str) -> None:
    """What the orders say for a step."""
    say(at=step, deed=deed)
    if deed == "kill":  # this process, its JVM and its source at once
        os.killpg(0, signal.SIGKILL)
    elif deed == "kill python":
        os.kill(os.getpid(), signal.SIGKILL)
    elif deed == "kill java":
        gateway = SparkContext._gateway
        assert gateway is not None
        os.kill(gateway.proc.pid, signal.SIGKILL)
    elif deed == "wait":
        sys.stdin.readline()


def screen(message: custody.Message) -> object:
    """Some fail now and then, some are no good at all; everything else is passed on."""
    luck = chance(message.key, message.payload["seq"], message.attempt)
    if chance(message.key, message.payload["seq"], "dead") < 5:
        raise custody.Dead("no good")
    if luck < 5:
        raise ValueError(f"no luck in attempt {message.attempt}")
    return passed_on(message)


def summing(message: custody.Message, state: KeyState[int]) -> object:
    """The same, and the state is the sum of what was passed on. It is updated before the message may fail."""
    state.update((state.get() or 0) + message.payload["seq"])
    return screen(message)


def screened(messages: DataFrame) -> DataFrame:
    """The same as a frame, but that nothing of it is no good."""
    luck = F.crc32(F.concat_ws("/", "_key", "seq", "_attempt").cast("binary")) % 1000
    return messages.transform(fail_when(luck < 5, "no luck")).select(
        "_partition",
        "_offset",
        "_key",
        "_failure",
        F.col("_partition").alias("partition"),
        F.col("_offset").alias("offset"),
        "seq",
        F.explode(F.sequence(F.lit(0), F.lit(SET - 1))).alias("part"),
    )


def screened_together(rows: pa.RecordBatch) -> pa.Table:
    """As `screen`, for a batch: those without luck break the call, the others are marked."""
    table = rows.select(["_partition", "_offset", "_key", "seq", "_attempt"]).to_pylist()
    hopeless = [chance(row["_key"], row["seq"], "dead") < 5 for row in table]
    if any(
        chance(row["_key"], row["seq"], row["_attempt"]) < 5 and not none
        for row, none in zip(table, hopeless, strict=True)
    ):
        raise ValueError("no luck")
    found = pa.Table.from_batches([rows.select(["_partition", "_offset", "seq"])])
    found = found.append_column("partition", found["_partition"]).append_column("offset", found["_offset"])
    parts = [found.append_column("part", pa.array([part] * found.num_rows)) for part in range(SET)]
    return pa.concat_tables([fail(one, hopeless, "no good", dead=True) for one in parts])


def main() -> int:
    here = {"spark.master": "local[2,4]", "spark.driver.memory": "1g"}
    small = {"spark.sql.shuffle.partitions": "2", "spark.ui.enabled": "false"}
    settings = json.loads(sys.argv[1]) if len(sys.argv) > 1 else here
    spark = session(app_name="custody-tests", config={**small, **settings})
    for module in (holding, verdict):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # executors cannot import tests
    spark.range(2, numPartitions=2).mapInArrow(lambda batches: batches, "id long").collect()
    say(at="ready")
    code = 0
    while line := sys.stdin.readline():
        orders = json.loads(line)
        code = run(spark, orders)
        if not orders["more"]:
            break
    return code


def tables(orders: dict[str, Any], schema: str | None) -> list[Outside]:
    """The sinks outside that the orders name."""
    files, table = orders["files"], orders["table"]
    made: list[Outside] = [] if files is None else [Files(files, schema=schema)]
    if table is not None:
        kind, place = table
        if kind == "jdbc":
            made.append(Jdbc(place, "rows", schema=schema))
        elif kind == "delta":
            made.append(Delta(place, schema=schema))
        else:
            made.append(Iceberg("shop.rows", warehouse=place, schema=schema))
    return made


def run(spark: SparkSession, orders: dict[str, Any]) -> int:
    """One run of the pipeline."""
    if orders["steps"]:
        steps.watch(steps.Steps(orders["steps"], do))
    framed, keyed, hold = orders["style"] == "frame", orders["style"] == "keyed", orders["hold"]
    outside = tables(orders, None if framed else ROW)
    schema = None if orders["style"] == "each" else "seq int"
    pipeline = Pipeline(source=SOURCE, group=GROUP, sink=[SINK, *outside], schema=schema)
    if framed:
        pipeline.frame(screened)
    elif orders["style"] == "batch":
        pipeline.batch(screened_together)
    elif keyed:
        pipeline.keyed(state=int)(summing)
    else:
        pipeline.each(screen)
    try:
        if hold is not None:
            holding.tasks(**hold)
        summary = pipeline.run(
            orders["url"],
            spark=spark,
            drain=orders["drain"],
            max_per_batch=orders["max_per_batch"],
            checkpoint=orders["checkpoint"],
            on_batch=lambda batch: say(batch=batch.claim, **asdict(batch.committed)),
            on_trouble=lambda text: say(trouble=text),
        )
    except CustodyError as error:
        say(at="end", code=error.code, error=str(error))
        return 1
    except Exception as error:
        say(at="end", code=type(error).__name__, error=str(error))
        return 1
    finally:
        holding.let_go()
    say(at="end", code=None, summary=asdict(summary))
    return 0


if __name__ == "__main__":
    code = main()
    if SparkContext._active_spark_context is not None:
        SparkContext._active_spark_context.stop()
    sys.exit(code)
