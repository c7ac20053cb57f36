"""Rows for sinks outside of the database, cached by the executors from the job that makes them until they are written.

Rows that an executor loses are computed again by Spark, perhaps with another result: a handler that succeeded may fail
the second time. A speculative copy of a task may also leave other rows in another executor's cache. So each row has the
number of the attempt that made it, and each partition has at least one such number. Reading a row of an attempt that
did not report is an error, after which the batch is run again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from custody.spark.tasks.job import DATA, MADE_BY, RESULT
from custody.verbs.pipelines import PartToWrite, Ranges

LOST = "rows for sinks outside were lost with their executor"
_COLUMNS = ("_partition", "_offset", "_key", DATA)
_CORRUPT = "_corrupt"

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class _Part(NamedTuple):
    """The cached rows of one job, and a function that makes the rows for a sink from them."""

    kept: DataFrame
    for_sink: Callable[[DataFrame, int], DataFrame]


class CachedRows:
    """The rows of one batch: of one job, or of many if a bad row had to be isolated. Used in the driver."""

    def __init__(self, first_topic: str | None) -> None:
        self._first_topic = first_topic
        self._parts: list[_Part] = []

    def framed(self, outputs: DataFrame) -> DataFrame:
        """A frame's rows, each with the number of its attempt, and a mark of each task. Cached: computed once."""
        fields = [StructField(field.name, field.dataType) for field in outputs.schema.fields]
        stamped = StructType([*fields, StructField(MADE_BY, LongType())])
        rows = outputs.mapInArrow(_stamp(to_arrow_schema(stamped, timezone="UTC")), stamped).persist()
        first = F.lit(self._first_topic)
        outside = F.col("_failure").isNull() & F.coalesce("_topic", first).eqNullSafe(first)

        def for_sink(kept: DataFrame, _: int) -> DataFrame:
            return kept.where(F.col("_partition").isNotNull() & outside).select(*_COLUMNS)

        self._parts.append(_Part(rows, for_sink))
        return rows

    def handled(self, results: DataFrame, schemas: Sequence[StructType | None]) -> DataFrame:
        """Caches the results of handlers (see job.KEEPING). Returns the rows for the driver: the reports, and a failure
        for each row that does not fit the schema of a sink."""
        parsed = {f"{DATA}_{sink}": _parsed(schema) for sink, schema in enumerate(schemas)}
        kept = results.withColumns(parsed).withColumnRenamed("attempt", MADE_BY).persist()
        is_row = F.col("what") == "row"

        def for_sink(kept: DataFrame, sink: int) -> DataFrame:
            return kept.where(is_row).select(
                F.col("partition").alias("_partition"),
                F.col("offset").alias("_offset"),
                F.col("key").alias("_key"),
                F.col(f"{DATA}_{sink}").dropFields(_CORRUPT).alias(DATA),
            )

        self._parts.append(_Part(kept, for_sink))
        wrong = _told(F.col(f"{name}.{_CORRUPT}") for name in parsed)
        misfit = F.lit("InvalidPayload at the schema of its sink")
        failure = {"what": F.lit("failed"), "outcome": F.lit("nack"), "error": wrong, "cause": misfit}
        reports = kept.where(~is_row | wrong.isNotNull()).withColumnRenamed(MADE_BY, "attempt")
        return reports.withColumns(
            {name: F.when(is_row, value).otherwise(F.col(name)) for name, value in failure.items()}
        ).select(*(field.split()[0] for field in RESULT.split(", ")))

    def forget(self) -> None:
        """Drops the last rows, because their job has failed."""
        self._parts.pop().kept.unpersist()

    def clear(self) -> None:
        while self._parts:
            self.forget()

    def rows(self, sink: int, attempts: Mapping[int, int], due: Sequence[PartToWrite]) -> DataFrame:
        """The rows to write to the sink with this index: those of messages that will be done."""
        rows = reduce(DataFrame.unionByName, (part.for_sink(_sure(part.kept, attempts), sink) for part in self._parts))
        undone = [(one.partition, offset) for one in due for offset in _undone(one)]
        if undone:
            held_back = rows.sparkSession.createDataFrame(undone, "_partition int, _offset bigint")
            rows = rows.join(F.broadcast(held_back), ["_partition", "_offset"], "left_anti")
        return rows.select("_partition", "_offset", "_key", f"{DATA}.*")


def _sure(kept: DataFrame, attempts: Iterable[int]) -> DataFrame:
    """The same rows, but reading one of an attempt that did not report is an error.

    Nothing is filtered before this check, so the marks of empty tasks are checked too.
    """
    known = F.col(MADE_BY).isNull() | F.col(MADE_BY).isin(list(attempts))
    checked = F.when(known, F.expr("true")).otherwise(F.raise_error(F.lit(LOST)).cast("boolean"))
    numbered = kept.withColumn("_number", F.monotonically_increasing_id())
    return numbered.where((F.col("_number") >= 0) & checked).drop("_number")


def _stamp(schema: pa.Schema) -> Task:
    """For `mapInArrow`: adds the number of this attempt to the rows, and a row with that number alone."""

    def stamp(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        attempt, found = pa.scalar(secrets.randbits(62), pa.int64()), schema
        for batch in batches:
            stamped = batch.append_column(MADE_BY, pa.repeat(attempt, batch.num_rows))
            found = stamped.schema
            yield stamped
        nothing = [pa.nulls(1, field.type) for field in found][:-1]
        yield pa.RecordBatch.from_arrays([*nothing, pa.repeat(attempt, 1)], schema=found)

    return stamp


def _parsed(schema: StructType | None) -> Column:
    """A handler's result as a row of a sink; without a schema, its text."""
    if schema is None:
        return F.struct(F.col("payload"), F.lit(None).cast("string").alias(_CORRUPT))
    read = StructType([*schema.fields, StructField(_CORRUPT, StringType())])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, "timeZone": "UTC"}
    return F.from_json(F.col("payload"), read, options)


def misfit(schemas: Iterable[StructType | None]) -> Column:
    """The error of the result in the column `payload` by the schemas of the sinks; null if it fits."""
    return _told(_parsed(schema).getField(_CORRUPT) for schema in schemas)


def _told(corrupt: Iterable[Column]) -> Column:
    return F.concat(F.lit("InvalidPayload: the result does not fit the schema of its sink: "), F.coalesce(*corrupt))


def _undone(due: PartToWrite) -> list[int]:
    """The claimed offsets that will not be done."""
    if due.done == due.ranges:
        return []
    missing: list[int] = np.setdiff1d(_offsets(due.ranges), _offsets(due.done), assume_unique=True).tolist()
    return missing


def _offsets(ranges: Ranges) -> np.ndarray:
    return np.concatenate([np.arange(first, last) for first, last in ranges] or [np.empty(0, np.int64)])
