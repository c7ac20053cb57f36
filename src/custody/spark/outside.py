"""Sinks outside of the database: files, and whatever a function of the user's writes to.

A claim's results are staged there before its commit, and shown after it. The number of the claim stays the same however
often its batch is run, and by whom; so whoever stages it again replaces what was staged, and nothing is shown twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from custody.errors import InvalidArgument

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    Writer = Callable[[DataFrame, "Write"], None]

STAGING = "_custody"
"""A directory beside the files of a table, which readers leave out because of its underscore."""


@dataclass(frozen=True, kw_only=True)
class Write:
    """The results of one claim on their way out: whose they are, the claim's number, and its driver's epoch."""

    pipeline: str
    claim: int
    epoch: int


class Outside:
    """A sink outside of the database. `schema` is for the results of handlers; frames have one already."""

    name: str
    schema: str | None
    takes_nothing = False
    """Whether it is told of a claim that has no rows."""

    def stage(self, rows: DataFrame, write: Write) -> None:
        """Writes the rows of a claim, in place of what was staged for it. Before the commit, maybe more than once."""
        raise NotImplementedError

    def show(self, spark: SparkSession, write: Write) -> None:
        """After the commit: makes what was staged visible. Done again after a crash, wherever that came."""

    def discard(self, spark: SparkSession, write: Write) -> None:
        """The claim was taken away and is never committed: clears away what any driver has staged for it."""


class Function(Outside):
    """A function of the user's, called before the commit with the rows and what they are of: at least once."""

    takes_nothing = True

    def __init__(self, function: Writer, schema: str | None = None) -> None:
        self.name, self.schema = f"function {function.__qualname__}", schema
        self._function = function

    def stage(self, rows: DataFrame, write: Write) -> None:
        self._function(rows, write)


class Files(Outside):
    """A table of files in a directory that all executors reach: each done message is in it once, whatever is killed.

    Its rows have `_partition`, `_offset` and `_key` of their messages beside the columns of the frame; or of `schema`,
    by which the results of a handler are read (without it they are in `payload`, as text).
    """

    def __init__(
        self,
        path: str,
        *,
        format: str = "parquet",
        partition_by: Sequence[str] = (),
        options: Mapping[str, str] | None = None,
        schema: str | None = None,
    ) -> None:
        if not path:
            raise InvalidArgument("files need a path", "Name a directory that the driver and all executors reach.")
        self.name, self.schema = f"{format} files in {path}", schema
        self._path, self._format = path.rstrip("/"), format
        self._partition_by, self._options = list(partition_by), dict(options or {})

    def stage(self, rows: DataFrame, write: Write) -> None:
        writer = rows.write.mode("overwrite").format(self._format).options(**self._options)
        writer.partitionBy(*self._partition_by).save(f"{self._staged(write)}/{write.claim}-{write.epoch}")

    def show(self, spark: SparkSession, write: Write) -> None:
        hadoop = _Hadoop(spark, self._path)
        staged = f"{self._staged(write)}/{write.claim}-{write.epoch}"
        for file in hadoop.files(staged):
            hadoop.move(f"{staged}/{file}", f"{self._path}/{file}")
        self.discard(spark, write)

    def discard(self, spark: SparkSession, write: Write) -> None:
        hadoop = _Hadoop(spark, self._path)
        for name in hadoop.directories(self._staged(write)):
            if name.split("-")[0] == str(write.claim):
                hadoop.remove(f"{self._staged(write)}/{name}")

    def _staged(self, write: Write) -> str:
        """Several pipelines may write into one table."""
        return f"{self._path}/{STAGING}/{quote(write.pipeline, safe='')}"


class _Hadoop:
    """The file system of a path, as Spark sees it: local, HDFS, an object store."""

    def __init__(self, spark: SparkSession, path: str) -> None:
        self._jvm: Any = spark.sparkContext._jvm
        self._files = self._path(path).getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(path)

    def files(self, directory: str) -> list[str]:
        """The data files below a directory, relative to it; none if it is not there."""
        if not self._files.exists(self._path(directory)):
            return []
        root = self._files.resolvePath(self._path(directory)).toUri().getPath()
        found = self._files.listFiles(self._path(directory), True)
        names = [name.removeprefix(f"{root}/") for name in _each(found, lambda file: file.getPath().toUri().getPath())]
        return sorted(name for name in names if not name.rpartition("/")[2].startswith(("_", ".")))

    def directories(self, directory: str) -> list[str]:
        if not self._files.exists(self._path(directory)):
            return []
        return [status.getPath().getName() for status in self._files.listStatus(self._path(directory))]

    def move(self, source: str, target: str) -> None:
        """Over what an interrupted move left there. Somebody else may be doing the same."""
        before, after = self._path(source), self._path(target)
        self._files.mkdirs(after.getParent())
        if self._files.rename(before, after) or not self._files.exists(before):
            return
        self._files.delete(after, False)
        if not self._files.rename(before, after) and self._files.exists(before):
            raise OSError(f"{source} could not be moved to {target}")

    def remove(self, directory: str) -> None:
        self._files.delete(self._path(directory), True)


def _each(found: Any, value: Callable[[Any], str]) -> Iterator[str]:
    while found.hasNext():
        yield value(found.next())
