"""Sinks outside of the database: files, and whatever a user's function writes to.

A claim's results are staged there before its commit and made visible after it. Each write has its own place; PostgreSQL
records which write was committed, and only that one becomes visible.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from custody.errors import InvalidArgument, PipelineFailed
from custody.handlers import require_finished

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from custody.verbs.pipelines import BatchReport

    Writer = Callable[[DataFrame, "Write"], None]

STAGING = "_custody"
"""A directory beside the files of a table. Readers skip it because of its underscore."""


OWN = ("_partition", "_offset", "_key")
"""Columns of each row that a table may have, and need not."""

FORMATS = ("parquet", "orc", "json", "csv", "text", "avro", "xml")
"""Formats that are plain files. A table format has its own log, so its files cannot just be moved into place."""


@dataclass(frozen=True, kw_only=True)
class Write:
    """One write of a claim's results. The claim's number stays the same however often its batch is run. `uid`
    identifies the pipeline, `epoch` the driver, `token` this write."""

    pipeline: str
    uid: str
    claim: int
    epoch: int
    token: str


class RowsRefused(Exception):
    """A sink has found the messages whose rows it refuses, each with its reason, and those that it did not try."""

    def __init__(self, report: BatchReport) -> None:
        self.report = report
        super().__init__(f"{len(report.failed)} messages have rows that the sink refuses")


class SinkDown(ConnectionError):
    """A sink cannot take anything now, whatever the rows are, but may do so later."""


def already(sink: str, write: Write) -> PipelineFailed:
    """The error for a claim that a table has, and that Custody has not committed."""
    return PipelineFailed(
        f"{sink} has claim {write.claim} of the pipeline {write.uid} already, which Custody has not committed",
        "A newer driver has written it, or Custody's database was restored from a backup: then compare the table with "
        "the group, and remove what the table knows of this pipeline.",
    )


class Outside:
    """A sink outside of the database. `schema` is for the results of handlers; frames have one already."""

    name: str
    schema: str | None
    shows = False
    """Whether `show` has something to do after the commit."""

    def stage(self, rows: DataFrame, write: Write) -> None:
        """Before the commit: writes the rows of a claim, perhaps more than once, each time with another token."""
        raise NotImplementedError

    def show(self, spark: SparkSession, write: Write) -> None:
        """After the commit: makes what was staged visible. Idempotent, because it is repeated after a crash."""

    def clear(self, spark: SparkSession, write: Write) -> None:
        """After the claim: removes what any driver has staged for it and for earlier claims."""

    def begins(self, database: str) -> None:
        """Before the first batch of a driver, with the address of Custody's database."""

    def abandon(self, uid: str) -> None:
        """After a failed batch of this pipeline: lets go of what is open. What is staged stays until `clear`."""


class Function(Outside):
    """A user's function, called with the rows and the `Write` before the commit, at least once."""

    def __init__(self, function: Writer, schema: str | None = None) -> None:
        self.name = f"function {getattr(function, '__qualname__', type(function).__name__)}"
        self.schema, self._function = schema, function

    def stage(self, rows: DataFrame, write: Write) -> None:
        require_finished(self._function(rows, write), self.name)


class Files(Outside):
    """A table of files in a directory that all executors can reach. Each done message is in it exactly once.

    Its rows have `_partition`, `_offset` and `_key` of their messages, and the columns of the frame, or for a handler
    those of `schema` (without one, the result is text in `payload`).
    """

    shows = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "parquet",
        partition_by: Sequence[str] = (),
        options: Mapping[str, str] | None = None,
        schema: str | None = None,
    ) -> None:
        if isinstance(path, os.PathLike):
            path = os.fspath(path)
        if not isinstance(path, str):
            raise InvalidArgument(f"files need a path, not {path!r}", "For example Files('/data/orders').")
        if isinstance(partition_by, str) or not all(isinstance(one, str) for one in partition_by):
            raise InvalidArgument(f"partition_by cannot be {partition_by!r}", "Give a list of columns: ['day'].")
        if not path.rstrip("/"):
            raise InvalidArgument("files need a path", "Give a directory that the driver and all executors can reach.")
        if str(format).lower() not in FORMATS:
            raise InvalidArgument(
                f"{format!r} is not a format of plain files ({', '.join(FORMATS)})",
                "For tables there are Jdbc, Delta and Iceberg. Write anything else with @pipeline.write.",
            )
        if not isinstance(options or {}, Mapping):
            raise InvalidArgument(f"options cannot be {options!r}", "Give names and values: {'compression': 'zstd'}.")
        self.path, self.schema = path.rstrip("/"), schema
        self.name = f"{format.lower()} files in {self.path}"
        self._format, self._partition_by, self._options = format.lower(), list(partition_by), dict(options or {})

    def stage(self, rows: DataFrame, write: Write) -> None:
        writer = rows.write.format(self._format).options(**self._options).partitionBy(*self._partition_by)
        writer.save(f"{self._home(write)}/{write.claim}-{write.token}")

    def show(self, spark: SparkSession, write: Write) -> None:
        from custody.spark.outside.hadoop import Hadoop

        hadoop = Hadoop(spark, self.path, self._options)
        staged = f"{self._home(write)}/{write.claim}-{write.token}"
        for file in hadoop.files(staged):
            hadoop.move(f"{staged}/{file}", f"{self.path}/{file}")

    def clear(self, spark: SparkSession, write: Write) -> None:
        from custody.spark.outside.hadoop import Hadoop

        hadoop = Hadoop(spark, self.path, self._options)
        for name in hadoop.names(self._home(write)):
            # a fenced driver may have written rows of an earlier claim meanwhile
            if int(name.split("-")[0]) <= write.claim:
                hadoop.remove(f"{self._home(write)}/{name}")

    def _home(self, write: Write) -> str:
        """The staging directory of a pipeline. Pipelines of several databases may write into one table."""
        return f"{self.path}/{STAGING}/{quote(write.pipeline, safe='')}-{write.uid}"
