"""Tables with a log of their own: rows are staged as files of Parquet before the commit, and appended after it.

The append is one commit of the table, and records the claim, so a repetition appends nothing. What the table would
refuse is found before the commit, by Spark. Runs in the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from custody.errors import DatabaseUnavailable, PipelineFailed
from custody.model.outcomes import Outcome
from custody.spark.outside.sinks import OWN, Files, RowsRefused, SinkDown, Write, already
from custody.verbs.pipelines import BatchReport

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

ROWS = 100_000
"""Most rows of a staged file, which the driver reads as a whole."""
REFUSED = 10_000
"""Most refused rows that are looked at together. If there are more, they are found after these have failed."""
_PLACE, _PROBLEM = ("_custody_partition", "_custody_offset"), "_custody_problem"


class Shape(NamedTuple):
    """What a table takes: its columns, and conditions in SQL by their names."""

    columns: StructType
    checks: Mapping[str, str]


class Lake(Files):
    """A table of files with a log. A subclass opens it, and appends to it."""

    def __init__(self, name: str, staging: str, schema: str | None) -> None:
        super().__init__(staging, options={"maxRecordsPerFile": str(ROWS)}, schema=schema)
        self.name = name

    def shape(self, rows: StructType) -> Shape:
        """What the table takes. Makes the table if there is none."""
        raise NotImplementedError

    def last_claim(self, write: Write) -> int:
        """The last claim of the pipeline that is in the table; 0 if there is none."""
        raise NotImplementedError

    def append(self, write: Write, chunks: Chunks) -> None:
        """Appends the rows in one commit of the table, with the claim, unless the claim is there or comes meanwhile."""
        raise NotImplementedError

    def passes(self, error: Exception) -> bool:
        """Whether the error is of the moment: the store or the catalogue is down, or another writer was faster."""
        raise NotImplementedError

    def stage(self, rows: DataFrame, write: Write) -> None:
        with self._explained("takes no rows"):
            shape = self.shape(rows.schema)
            if self.last_claim(write) >= write.claim:
                raise already(self.name, write)
        super().stage(_fitted(rows, shape, self.name), write)

    def show(self, spark: SparkSession, write: Write) -> None:
        chunks = Chunks(spark, self._staged(spark, write))
        try:
            with self._explained(f"does not show claim {write.claim}, which is committed"):
                if chunks.files and self.last_claim(write) < write.claim:
                    self.append(write, chunks)
        except SinkDown as down:
            raise DatabaseUnavailable(f"{self.name}: {down}", "The rows are staged; the pipeline waits.") from down
        except Exception:
            if chunks.error is not None:
                raise chunks.error from None
            raise

    def _staged(self, spark: SparkSession, write: Write) -> list[str]:
        from custody.spark.outside.hadoop import Hadoop

        staged = f"{self._home(write)}/{write.claim}-{write.token}"
        return [f"{staged}/{file}" for file in Hadoop(spark, self.path, self._options).files(staged)]

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (PipelineFailed, SinkDown):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:2000]
            if self.passes(error):
                raise SinkDown(text) from error
            raise PipelineFailed(
                f"{self.name} {what}: {text}", "Fix it and start the pipeline again: nothing was lost."
            ) from error


class Chunks:
    """The staged rows of a claim, one file at a time."""

    def __init__(self, spark: SparkSession, files: list[str]) -> None:
        self._spark, self.files = spark, files
        self.error: Exception | None = None
        """Why a file could not be read: whoever consumes the rows tells it in words of its own."""

    def tables(self, schema: pa.Schema) -> Iterator[pa.Table]:
        try:
            for file in self.files:
                yield self._spark.read.parquet(file).toArrow().select(schema.names).cast(schema)
        except Exception as error:
            self.error = error
            raise

    def reader(self, schema: pa.Schema) -> pa.RecordBatchReader:
        import pyarrow as pa

        batches = (batch for table in self.tables(schema) for batch in table.to_batches())
        return pa.RecordBatchReader.from_batches(schema, batches)


def _fitted(rows: DataFrame, table: Shape, name: str) -> DataFrame:
    """The rows with the columns and types of the table. Raises RowsRefused if some do not fit."""
    from pyspark.sql import functions as F

    _require_columns(rows, table, name)
    given = {field.name: field.dataType for field in rows.schema.fields}
    columns: list[Column] = []
    problems: list[Column] = []
    for field in table.columns.fields:
        if field.name not in given:
            columns.append(F.lit(None).cast(field.dataType).alias(field.name))
            continue
        value = F.col(f"`{field.name}`")
        fitting = value if given[field.name] == field.dataType else value.try_cast(field.dataType)
        columns.append(fitting.alias(field.name))
        if fitting is not value:
            wrong = F.concat(value.cast("string"), F.lit(f" in {field.name} is no {field.dataType.simpleString()}"))
            problems.append(F.when(value.isNotNull() & fitting.isNull(), F.coalesce(wrong, F.lit(field.name))))
        if not field.nullable:
            problems.append(F.when(fitting.isNull(), F.lit(f"{field.name} is null")))
    places = [F.col(own).alias(place) for own, place in zip(OWN, _PLACE, strict=False)]
    found = F.coalesce(*problems) if problems else F.lit(None).cast("string")
    fitted = rows.select(*places, found.alias(_PROBLEM), *columns)
    for check, condition in table.checks.items():
        broken = F.when(~F.coalesce(F.expr(condition), F.lit(False)), F.lit(f"{check} ({condition}) is violated"))
        fitted = fitted.withColumn(_PROBLEM, F.coalesce(_PROBLEM, broken))
    if problems or table.checks:
        _refuse(fitted, name)
    return fitted.select(*(F.col(f"`{field.name}`") for field in table.columns.fields))


def _require_columns(rows: DataFrame, table: Shape, name: str) -> None:
    known = {field.name: field for field in table.columns.fields}
    unknown = [one for one in rows.columns if one not in known and one not in OWN]
    if unknown:
        raise PipelineFailed(
            f"{name} has no column {unknown[0]!r}; it has: {', '.join(known)}",
            "Select the columns of the table in the frame (or in the schema of the sink), or add the column.",
        )
    needed = [one for one, field in known.items() if not field.nullable and one not in rows.columns]
    if needed:
        raise PipelineFailed(
            f"{name} needs the column {needed[0]!r}, and the rows do not have it",
            "Add it to the frame (or to the schema of the sink).",
        )


def _refuse(fitted: DataFrame, name: str) -> None:
    from pyspark.sql import functions as F

    wrong = fitted.where(F.col(_PROBLEM).isNotNull()).select(*_PLACE, _PROBLEM).limit(REFUSED).collect()
    if wrong:
        failed = {(row[0], row[1]): Outcome("nack", error=f"{name}: {row[2]}"[:2000]) for row in wrong}
        raise RowsRefused(BatchReport(failed=failed))
