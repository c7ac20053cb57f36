"""Spark writes the temporary checkpoint of a pipeline by Hadoop's FileSystem, and that of other queries as it did."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from custody.spark.driver import checkpoint_files


def writes(spark: SparkSession, directory: Path) -> str:
    """The class by which a query that starts now would write its checkpoint."""
    conf = spark._jsparkSession.sessionState().newHadoopConf()  # type: ignore[attr-defined]
    jvm = spark._jvm
    assert jvm is not None
    managers = jvm.org.apache.spark.sql.execution.streaming.checkpointing.CheckpointFileManager
    made = managers.create(jvm.org.apache.hadoop.fs.Path(directory.as_uri()), conf)
    return str(made.getClass().getSimpleName())


def test_only_queries_that_start_meanwhile_write_otherwise(spark: SparkSession, tmp_path: Path) -> None:
    assert writes(spark, tmp_path) == "FileContextBasedCheckpointFileManager"
    with checkpoint_files.written_by_file_system(spark):
        assert writes(spark, tmp_path) == "FileSystemBasedCheckpointFileManager"
    assert writes(spark, tmp_path) == "FileContextBasedCheckpointFileManager"


def test_the_choice_of_the_user_stays(spark: SparkSession, tmp_path: Path) -> None:
    usual = "org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager"
    spark.conf.set(checkpoint_files.SETTING, usual)
    try:
        with checkpoint_files.written_by_file_system(spark):
            assert writes(spark, tmp_path) == usual.rpartition(".")[2]
        assert spark.conf.get(checkpoint_files.SETTING) == usual
    finally:
        spark.conf.unset(checkpoint_files.SETTING)
