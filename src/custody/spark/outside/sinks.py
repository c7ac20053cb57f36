"""Sinks outside of the database: files, and whatever a function of the user's writes to.

A claim's results are staged there before its commit, and shown after it. Each writing of them has a place of its own;
PostgreSQL knows which of them was committed, and that one is shown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from custody.errors import InvalidArgument
from custody.handlers import require_finished

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    Writer = Callable[[DataFrame, "Write"], None]

STAGING = "_custody"
"""A directory beside the files of a table, which readers leave out because of its underscore."""


FORMATS = ("parquet", "orc", "json", "csv", "text", "avro", "xml")
"""What is nothing but files: a table format has a log of its own, which cannot be moved together from parts."""


@dataclass(frozen=True, kw_only=True)
class Write:
    """The results of one claim on their way out: whose they are, and the claim's number, which stays the same however
    often its batch is run. `uid` is the pipeline's alone, `epoch` its driver's, `token` of this one time."""

    pipeline: str
    uid: str
    claim: int
    epoch: int
    token: str


class Outside:
    """A sink outside of the database. `schema` is for the results of handlers; frames have one already."""

    name: str
    schema: str | None
    shows = False
    """Whether there is something to be done after the commit."""

    def stage(self, rows: DataFrame, write: Write) -> None:
        """Writes the rows of a claim. Before the commit, maybe more than once, each time with another token."""
        raise NotImplementedError

    def show(self, spark: SparkSession, write: Write) -> None:
        """After the commit: makes what was staged visible. Done again after a crash, wherever that came."""

    def clear(self, spark: SparkSession, write: Write) -> None:
        """The claim is over: clears away what any driver has staged for it, and for those before it."""


class Function(Outside):
    """A function of the user's, called before the commit with the rows and what they are of: at least once."""

    def __init__(self, function: Writer, schema: str | None = None) -> None:
        self.name = f"function {getattr(function, '__qualname__', type(function).__name__)}"
        self.schema, self._function = schema, function

    def stage(self, rows: DataFrame, write: Write) -> None:
        require_finished(self._function(rows, write), self.name)


class Files(Outside):
    """A table of files in a directory that all executors reach: each done message is in it once, whatever is killed.

    Its rows have `_partition`, `_offset` and `_key` of their messages beside the columns of the frame; or of `schema`,
    by which the results of a handler are read (without it they are in `payload`, as text).
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
            raise InvalidArgument("files need a path", "Name a directory that the driver and all executors reach.")
        if str(format).lower() not in FORMATS:
            raise InvalidArgument(
                f"{format!r} is no format of plain files ({', '.join(FORMATS)})",
                "Write to it with @pipeline.write, which gives you the rows as a DataFrame.",
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
            # a driver that was fenced may have written of an earlier claim meanwhile
            if int(name.split("-")[0]) <= write.claim:
                hadoop.remove(f"{self._home(write)}/{name}")

    def _home(self, write: Write) -> str:
        """Several pipelines may write into one table, of several databases too."""
        return f"{self.path}/{STAGING}/{quote(write.pipeline, safe='')}-{write.uid}"
