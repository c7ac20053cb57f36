"""A small Spark program, run as a process of its own: work that fails, work that succeeds, and what it ran on."""

from __future__ import annotations

import json
import os
import sys

import pyspark
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession

from custody.spark.session import session


def interpreter(_: object) -> tuple[str, str]:
    return sys.executable, pyspark.__file__


def broken(row: Row) -> int:
    raise ValueError(f"no luck with {row.id}")


def broken_batch(frame: DataFrame, number: int) -> None:
    raise ValueError(f"no luck with batch {number}")


def fail(spark: SparkSession) -> list[bool]:
    """A task that fails four times and a query whose batch fails: does the driver get the reason?"""
    failures = []
    try:
        spark.range(1, numPartitions=1).rdd.map(broken).collect()
    except Exception as error:
        failures.append("no luck with" in str(error))
    try:
        stream = spark.readStream.format("rate").load().writeStream.foreachBatch(broken_batch)
        stream.trigger(availableNow=True).start().awaitTermination()
    except PySparkException as error:
        failures.append("no luck with batch 0" in str(error))
    return failures


def main() -> None:
    spark = session()
    failures = fail(spark) if "fail" in sys.argv else []
    gateway = SparkContext._gateway
    assert gateway is not None
    report = {
        "sum": spark.range(10, numPartitions=2).groupBy().sum("id").collect()[0][0],
        "workers": spark.sparkContext.parallelize(range(2), 2).map(interpreter).collect(),
        "failures": failures,
        "java": gateway.jvm.java.lang.System.getProperty("java.home"),
        "jvm": None if gateway.proc is None else gateway.proc.pid,
        "master": spark.sparkContext.master,
        "page": spark.sparkContext.uiWebUrl,
        "listens on": os.environ.get("SPARK_LOCAL_IP"),
        "path": os.environ.get("PYTHONPATH"),
        "shuffle": spark.conf.get("spark.sql.shuffle.partitions"),
        "time zone": spark.conf.get("spark.sql.session.timeZone"),
    }
    spark.stop()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
