"""The jobs of one batch: the one that runs a claim's messages, and those that isolate the rows that break it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from custody.errors import ClaimLost, InvalidArgument
from custody.spark.driver.frame_check import check
from custody.spark.driver.group_reader import references
from custody.spark.driver.isolate import Isolation, Reference
from custody.spark.driver.watching import Watch, limit_of_part
from custody.spark.environment.shipping import runs_here
from custody.spark.faults import NotTheRows, TookTooLong, described, fault
from custody.spark.outside.cached_rows import CachedRows
from custody.spark.pipeline import Pipeline
from custody.spark.tasks import each, frame
from custody.spark.tasks.events import EVENTS, reader
from custody.spark.tasks.job import DATA, KEEPING, RESULT, Job, gather
from custody.verbs.pipelines import BatchReport, DriverVerbs


def parsed(schema: str | None) -> StructType | None:
    """The schema of a pipeline, parsed; this needs a session."""
    if schema is None:
        return None
    try:
        fields = cast("StructType", StructType.fromDDL(schema))
    except PySparkException as error:
        raise InvalidArgument(
            f"the schema {schema!r} is invalid: {described(error)}",
            "Write the fields as in SQL: 'sku string, add int'.",
        ) from error
    taken = [field.name for field in fields if field.name.startswith("_")]
    if taken:
        raise InvalidArgument(
            f"the schema has a field {taken[0]!r}", "Rename it: names with a leading underscore are Custody's."
        )
    return fields


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is known about a pipeline before it runs."""

    schema: StructType | None
    narrow: bool
    """Whether the frame keeps rows in their tasks and in order."""


def shape_of(pipeline: Pipeline, spark: SparkSession) -> Shape:
    """Refuses an invalid schema, and a frame that cannot be run batch by batch. Changes nothing."""
    schema = parsed(pipeline.schema)
    narrow = pipeline.transform is not None and check(
        spark, pipeline.transform, schema, published=bool(pipeline.sinks), keeps=bool(pipeline.outside)
    )
    return Shape(schema=schema, narrow=narrow)


@dataclass(frozen=True, kw_only=True)
class BatchJobs:
    """Runs the batches of a pipeline. Runs in the driver, within `foreachBatch`."""

    pipeline: Pipeline
    spark: SparkSession
    drive: DriverVerbs
    job: Job
    shape: Shape
    kept: CachedRows
    """The rows of the batch for sinks outside. The caller clears them after writing."""
    watch: Watch
    stopping: Callable[[], bool]
    trouble: Callable[[str], None]

    def work(self, batch: DataFrame, *, careful: bool, unproven: bool = False) -> tuple[int, BatchReport] | None:
        """The claim's number and the outcomes of its messages. None if the batch has no messages.

        `unproven`: no message was done since the start, so the code may be wrong.

        The number always comes with the rows: guessing the claim in flight could settle another one.
        """
        if self.pipeline.handler is not None:
            task = each.task(replace(self.job, careful=careful), self.pipeline.handler)
            if self.job.keeps:
                schemas = [parsed(sink.schema) for sink in self.pipeline.outside]
                results = self.kept.handled(batch.mapInArrow(task, KEEPING), schemas)
            else:
                results = batch.mapInArrow(task, RESULT)
            claim, work = gather(results.toArrow())
            return None if claim is None else (claim, work)
        first = batch.select("_claim").first()
        if first is None:
            return None
        number = int(first["_claim"])
        try:
            with self.watch.job("the frame", self.job.handler_timeout):
                work = self._framed(batch, number, once=True)
        except Exception as error:
            if fault(error) != "row" or self.stopping():
                raise
            self.trouble(f"a row breaks the batch; running it in parts to find the row ({described(error)})")
            messages = self.drive.by_key(number)
            if not messages:
                raise ClaimLost(f"claim {number} is no longer in flight") from error
            isolation = Isolation(run=lambda part: self._part(number, part), stopping=self.stopping, unproven=unproven)
            return number, isolation.of(messages)
        work.exact = self.shape.narrow and not work.failed
        work.ran = sum(part.messages for part in self.drive.claimed(number))
        return number, work

    def _framed(self, batch: DataFrame, number: int, *, once: bool) -> BatchReport:
        """One job: runs the frame over the referenced messages and stages its rows."""
        assert self.pipeline.transform is not None
        # elsewhere a second attempt may be speculative, or replace a lost executor's, which is no row's fault
        job = replace(self.job, once=once and runs_here(self.spark.sparkContext))
        messages = batch.mapInArrow(reader(job), EVENTS)
        try:
            result = self.pipeline.transform(frame.typed(messages, self.shape.schema))
        except PySparkException:
            raise
        except Exception as error:  # raised in the driver, before any row is processed
            raise NotTheRows(f"the frame raised {type(error).__name__}: {error}") from error
        rows = frame.outputs(result, published=bool(self.job.sinks), keeps=self.job.keeps)
        if self.job.keeps:
            rows = self.kept.framed(rows).drop(DATA)
        try:
            _, work = gather(rows.mapInArrow(frame.stager(self.job, number), RESULT).toArrow())
        except Exception:
            if self.job.keeps:
                self.kept.forget()
            raise
        return work

    def _part(self, number: int, part: list[Reference]) -> BatchReport:
        rows = self.spark.createDataFrame(references(number, sorted(part))).coalesce(1)
        try:
            with self.watch.job(_named(part), limit_of_part(self.job.handler_timeout, len(part))):
                return self._framed(rows, number, once=len(part) > 1)
        except TookTooLong:
            self.drive.keep()  # if the database does not answer, every job waits, which is no row's fault
            raise


def _named(part: list[Reference]) -> str:
    if len(part) != 1:
        return f"the frame over {len(part)} messages"
    return f"the frame over partition {part[0][0]}, offset {part[0][1]}"
