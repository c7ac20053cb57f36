"""How Spark writes the temporary checkpoint of a query.

For a local file Spark's usual way (Hadoop's FileContext) starts a dozen programs, chmod and stat among them, and writes
two such files for each batch: a fifth of the time of a small one. By Hadoop's FileSystem it starts a few. Both write a
draft and rename it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

SETTING = "spark.sql.streaming.checkpointFileManagerClass"
_BY_FILE_SYSTEM = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


@contextmanager
def written_by_file_system(spark: SparkSession) -> Iterator[None]:
    """For the query that is started meanwhile, which copies the settings of its session. Other queries of the session
    keep theirs, because on other file systems the usual way may be the safer one. One query at a time."""
    if spark.conf.get(SETTING, None) is not None:  # the user's choice
        yield
        return
    spark.conf.set(SETTING, _BY_FILE_SYSTEM)
    try:
        yield
    finally:
        spark.conf.unset(SETTING)
