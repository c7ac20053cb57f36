"""Rows for sinks outside of the database, kept by the executors from the job that makes them until they are written.

What an executor loses, Spark makes again, and maybe otherwise: a handler that went well fails the second time. So each
row has the number of the attempt that made it. Only rows of the attempts that reported are written, and all of them
have to be there still when that is over; else the batch is run again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import LongType, StringType, StructField, StructType

from custody.errors import StageLost
from custody.pipelines import Due, Ranges
from custody.spark.job import RESULT

DATA, MADE_BY = "_data", "_made_by"
_COLUMNS = ("_partition", "_offset", "_key", MADE_BY, DATA)
_CORRUPT = "_corrupt"


class _Part(NamedTuple):
    """What one job kept: all of it, the rows that were reported, and those that go to the sink of a number."""

    persisted: DataFrame
    rows: DataFrame
    for_sink: Callable[[int], DataFrame]


class Kept:
    """The rows of one batch: of one job, or of many if a bad row had to be found. Used in the driver."""

    def __init__(self, first_topic: str | None) -> None:
        self._first_topic = first_topic
        self._parts: list[_Part] = []

    def framed(self, outputs: DataFrame) -> DataFrame:
        """A frame's rows, each with what made it; computed once, as long as executors live."""
        stamped = StructType([*outputs.schema.fields, StructField(MADE_BY, LongType())])
        rows = outputs.mapInArrow(_stamp, stamped).persist()
        first = F.lit(self._first_topic)
        outside = rows.where(F.col("_failure").isNull() & F.coalesce("_topic", first).eqNullSafe(first))
        self._parts.append(_Part(rows, rows, lambda _: outside.select(*_COLUMNS)))
        return rows

    def handled(self, results: DataFrame, schemas: Sequence[StructType | None]) -> DataFrame:
        """The results of handlers (see job.KEEPING). Returns those for the driver: the reports, and a failure for each
        row that does not fit the schema of a sink."""
        parsed = {f"{DATA}_{sink}": _parsed(schema) for sink, schema in enumerate(schemas)}
        kept = results.withColumns(parsed).persist()
        is_row = F.col("what") == "row"
        rows = kept.where(is_row).select(
            F.col("partition").alias("_partition"),
            F.col("offset").alias("_offset"),
            F.col("key").alias("_key"),
            F.col("attempt").alias(MADE_BY),
            *parsed,
        )

        def for_sink(sink: int) -> DataFrame:
            return rows.withColumn(DATA, F.col(f"{DATA}_{sink}").dropFields(_CORRUPT)).select(*_COLUMNS)

        self._parts.append(_Part(kept, rows, for_sink))
        wrong = F.coalesce(*(F.col(f"{name}.{_CORRUPT}") for name in parsed))
        text = F.concat(F.lit("InvalidPayload: the result does not fit the schema of its sink: "), wrong)
        failure = {"what": F.lit("failed"), "outcome": F.lit("nack"), "error": text}
        reports = kept.where(~is_row | wrong.isNotNull())
        return reports.withColumns(
            {name: F.when(is_row, value).otherwise(F.col(name)) for name, value in failure.items()}
        ).select(*(field.split()[0] for field in RESULT.split(", ")))

    def forget(self) -> None:
        """The last ones are not wanted: their job has failed."""
        self._parts.pop().persisted.unpersist()

    def clear(self) -> None:
        while self._parts:
            self.forget()

    def rows(self, sink: int, attempts: Mapping[int, int], due: Sequence[Due]) -> DataFrame:
        """What is to be written to the sink of this number: the rows of messages that will be done."""
        made = [part.for_sink(sink).where(F.col(MADE_BY).isin(list(attempts))) for part in self._parts]
        rows = reduce(DataFrame.unionByName, made)
        undone = [(one.partition, offset) for one in due for offset in _undone(one)]
        if undone:
            held_back = rows.sparkSession.createDataFrame(undone, "_partition int, _offset bigint")
            rows = rows.join(F.broadcast(held_back), ["_partition", "_offset"], "left_anti")
        return rows.select("_partition", "_offset", "_key", f"{DATA}.*")

    def check(self, attempts: Mapping[int, int]) -> None:
        """After they were written: refuses if some of them had to be made again meanwhile."""
        found = sum(part.rows.where(F.col(MADE_BY).isin(list(attempts))).count() for part in self._parts)
        made = sum(attempts.values())
        if found != made:
            raise StageLost(f"{found} of {made} rows for sinks outside are there still", "Run the batch again.")


def _stamp(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    attempt = secrets.randbits(62)
    for batch in batches:
        yield batch.append_column(MADE_BY, pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows))


def _parsed(schema: StructType | None) -> Column:
    """A handler's result as a row of a sink; without a schema its text."""
    if schema is None:
        return F.struct(F.col("payload"), F.lit(None).cast("string").alias(_CORRUPT))
    read = StructType([*schema.fields, StructField(_CORRUPT, StringType())])
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _CORRUPT, "timeZone": "UTC"}
    return F.from_json(F.col("payload"), read, options)


def _undone(due: Due) -> list[int]:
    """The offsets that were claimed and will not be done."""
    if due.done == due.ranges:
        return []
    missing: list[int] = np.setdiff1d(_offsets(due.ranges), _offsets(due.done), assume_unique=True).tolist()
    return missing


def _offsets(ranges: Ranges) -> np.ndarray:
    return np.concatenate([np.arange(first, last) for first, last in ranges] or [np.empty(0, np.int64)])
