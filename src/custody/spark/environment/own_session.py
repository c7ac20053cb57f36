"""Sessions that Custody has not made: whether a pipeline can run in one. Its settings are its owner's, and stay."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession, is_remote

from custody.errors import PipelineRefused
from custody.spark.faults import described


def require_fit(spark: SparkSession) -> None:
    """Runs on the driver, before anything is claimed: refuses a session in which no pipeline can run, and says why."""
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        raise _connect()
    _require_custody(spark)


def require_classic() -> None:
    """Refuses to look for a session where this process would get one of Spark Connect."""
    if is_remote() or "SPARK_REMOTE" in os.environ:
        raise _connect()


def _connect() -> PipelineRefused:
    return PipelineRefused(
        "a session of Spark Connect has its driver elsewhere, and a pipeline has to be in the driver",
        "Run it in a classic session: custody pipeline run, spark-submit, or SparkSession.builder.master(…). "
        "format('custody') reads and writes through Connect too.",
    )


def _require_custody(spark: SparkSession) -> None:
    """Workers are the `python3` of the PATH unless PYSPARK_PYTHON said otherwise when Spark was started."""
    context = spark.sparkContext
    if not str(context.master).startswith("local") or shutil.which(context.pythonExec) == sys.executable:
        return
    try:
        context.parallelize([0], 1).mapPartitions(_loaded).collect()
    except PySparkException as error:
        raise PipelineRefused(
            f"the Python of Spark's workers, {context.pythonExec!r}, cannot run Custody: {described(error)}",
            "Before the session is made: os.environ['PYSPARK_PYTHON'] = sys.executable, or activate the environment.",
        ) from error


def _loaded(_: Iterable[int]) -> Iterable[bool]:
    """Runs in a worker, which has to load this module for it."""
    return [True]
