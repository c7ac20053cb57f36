"""Operations on Hadoop's file systems, from the driver, for files that Spark has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession


class Hadoop:
    """The file system of a path with these options: local, HDFS, an object store."""

    def __init__(self, spark: SparkSession, path: str, options: Mapping[str, str]) -> None:
        self._jvm = cast("Any", spark.sparkContext._jvm)
        given = self._jvm.PythonUtils.toScalaMap(dict(options))
        self._settings = spark._jsparkSession.sessionState().newHadoopConfWithOptions(given)
        self._files = self._path(path).getFileSystem(self._settings)

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(path)

    def files(self, directory: str) -> list[str]:
        """The data files below a directory, relative to it; none if the directory does not exist."""
        if not self._files.exists(self._path(directory)):
            return []
        root = self._files.resolvePath(self._path(directory)).toUri().getPath()
        found = self._files.listFiles(self._path(directory), True)
        names = [name.removeprefix(f"{root}/") for name in _each(found, lambda file: file.getPath().toUri().getPath())]
        return sorted(name for name in names if not any(map(_is_hidden, name.split("/"))))

    def names(self, directory: str) -> list[str]:
        if not self._files.exists(self._path(directory)):
            return []
        return [status.getPath().getName() for status in self._files.listStatus(self._path(directory))]

    def move(self, source: str, target: str) -> None:
        """Moves a file. Another driver may do the same at once, or have died halfway. Names are unique to one write."""
        before, after = self._path(source), self._path(target)
        self._files.mkdirs(after.getParent())
        failure: Py4JJavaError | None = None
        try:
            if self._files.rename(before, after):
                return
        except Py4JJavaError as error:  # if the target exists, some file systems raise and others return false
            failure = error
        if not self._files.exists(before):
            return
        if not self._files.exists(after):
            raise OSError(f"{source} could not be moved to {target}") from failure
        if self._files.getFileStatus(before).getLen() == self._files.getFileStatus(after).getLen():
            self._files.delete(before, False)
        else:
            copy = self._jvm.org.apache.hadoop.fs.FileUtil.copy
            copy(self._files, before, self._files, after, True, True, self._settings)

    def remove(self, directory: str) -> None:
        self._files.delete(self._path(directory), True)


def _is_hidden(name: str) -> bool:
    """Hidden for Spark. The directory of a column's value (`name=value`) is not, whatever it begins with."""
    return name.startswith(("_", ".")) and "=" not in name


def _each(found: Any, value: Callable[[Any], str]) -> Iterator[str]:
    while found.hasNext():
        yield value(found.next())
