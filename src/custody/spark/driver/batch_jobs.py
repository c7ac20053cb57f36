"""The work of one batch: the job that runs a claim's messages, and the jobs that find the rows which break it."""

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
from custody.verbs.pipelines import Drive, Work


def parsed(schema: str | None) -> StructType | None:
    """The schema of a pipeline; it needs a session to be understood."""
    if schema is None:
        return None
    try:
        fields = cast("StructType", StructType.fromDDL(schema))
    except PySparkException as error:
        raise InvalidArgument(f"the schema {schema!r} is not one: {described(error)}") from error
    taken = [field.name for field in fields if field.name.startswith("_")]
    if taken:
        raise InvalidArgument(
            f"the schema has a field {taken[0]!r}", "Names that begin with an underscore belong to Custody here."
        )
    return fields


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is known of a pipeline before it runs."""

    schema: StructType | None
    narrow: bool
    """The frame's rows stay in their tasks and in order."""


def shape_of(pipeline: Pipeline, spark: SparkSession) -> Shape:
    """Refuses a schema that is none, and a frame that cannot be run batch by batch. Changes nothing."""
    schema = parsed(pipeline.schema)
    narrow = pipeline.transform is not None and check(
        spark, pipeline.transform, schema, published=bool(pipeline.sinks), keeps=bool(pipeline.outside)
    )
    return Shape(schema=schema, narrow=narrow)


@dataclass(frozen=True, kw_only=True)
class BatchJobs:
    """Runs the batches of a pipeline. In the driver, within `foreachBatch`."""

    pipeline: Pipeline
    spark: SparkSession
    drive: Drive
    job: Job
    shape: Shape
    kept: CachedRows
    """The rows of the batch for sinks outside: the caller clears them when they are written."""
    watch: Watch
    stopping: Callable[[], bool]
    trouble: Callable[[str], None]

    def work(self, batch: DataFrame, *, careful: bool, unproven: bool = False) -> tuple[int, Work] | None:
        """The claim's number and what its messages came to. None if the batch has no messages.

        `unproven`: nothing has been done since the start, so it may be the code that fails.

        The number comes with the rows, always: who guesses the claim in flight may settle another one's.
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
            self.trouble(f"a row breaks the batch, which is run in parts to find it ({described(error)})")
            messages = self.drive.by_key(number)
            if not messages:
                raise ClaimLost(f"claim {number} is not in flight any more") from error
            isolation = Isolation(run=lambda part: self._part(number, part), stopping=self.stopping, unproven=unproven)
            return number, isolation.of(messages)
        work.exact = self.shape.narrow and not work.failed
        work.ran = sum(part.messages for part in self.drive.claimed(number))
        return number, work

    def _framed(self, batch: DataFrame, number: int, *, once: bool) -> Work:
        """One job: the frame over the referenced messages, its rows staged."""
        assert self.pipeline.transform is not None
        # elsewhere a second attempt may be a copy of a slow one, or the heir of a lost executor, and no row's fault
        job = replace(self.job, once=once and runs_here(self.spark.sparkContext))
        messages = batch.mapInArrow(reader(job), EVENTS)
        try:
            result = self.pipeline.transform(frame.typed(messages, self.shape.schema))
        except PySparkException:
            raise
        except Exception as error:  # here in the driver, where there is no row yet
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

    def _part(self, number: int, part: list[Reference]) -> Work:
        rows = self.spark.createDataFrame(references(number, sorted(part))).coalesce(1)
        try:
            with self.watch.job(_named(part), limit_of_part(self.job.handler_timeout, len(part))):
                return self._framed(rows, number, once=len(part) > 1)
        except TookTooLong:
            self.drive.keep()  # a database that does not answer makes every job wait: that is no row's fault
            raise


def _named(part: list[Reference]) -> str:
    if len(part) != 1:
        return f"the frame over {len(part)} messages"
    return f"the frame over partition {part[0][0]}, offset {part[0][1]}"
