"""Checks whether a pipeline can run in a session that the user created. Its settings are not changed."""

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
    """Refuses a session in which no pipeline can run. Runs on the driver, before anything is claimed."""
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        raise _connect()
    _require_custody(spark)


def require_classic() -> None:
    """Refuses if this process would get a session of Spark Connect."""
    if is_remote() or "SPARK_REMOTE" in os.environ:
        raise _connect()


def _connect() -> PipelineRefused:
    return PipelineRefused(
        "a pipeline must run in the driver's process, and the driver of a Spark Connect session is elsewhere",
        "Run it in a classic session: custody pipeline run, spark-submit, or SparkSession.builder.master(…). "
        "format('custody') works through Connect too.",
    )


def _require_custody(spark: SparkSession) -> None:
    """Refuses if workers cannot import Custody: they run the `python3` of the PATH unless PYSPARK_PYTHON was set."""
    context = spark.sparkContext
    if not str(context.master).startswith("local") or shutil.which(context.pythonExec) == sys.executable:
        return
    try:
        context.parallelize([0], 1).mapPartitions(_loaded).collect()
    except PySparkException as error:
        raise PipelineRefused(
            f"the Python of Spark's workers, {context.pythonExec!r}, cannot run Custody: {described(error)}",
            "Before creating the session: os.environ['PYSPARK_PYTHON'] = sys.executable, or activate the environment.",
        ) from error


def _loaded(_: Iterable[int]) -> Iterable[bool]:
    """Runs in a worker, which must import this module for it."""
    return [True]
