"""The jobs of one batch: the one that runs a claim's messages, and those that isolate the rows that break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import randrange
from typing import Literal, cast

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from custody.errors import ClaimLost, InvalidArgument
from custody.spark.driver.frame_check import check
from custody.spark.driver.group_reader import references
from custody.spark.driver.isolate import Isolation, Reference, Sliced
from custody.spark.driver.task_plan import attempts, is_one_stage
from custody.spark.driver.watching import Watch
from custody.spark.environment.shipping import runs_here
from custody.spark.faults import NotTheRows, TaskFailed, TookTooLong, decisive, described, fault
from custody.spark.outside.cached_rows import CachedRows
from custody.spark.pipeline import Pipeline
from custody.spark.tasks import batch as batches
from custody.spark.tasks import each, frame
from custody.spark.tasks.events import EVENTS, reader
from custody.spark.tasks.job import DATA, KEEPING, RESULT, Gathered, Job, gather
from custody.spark.tasks.state_type import StateType
from custody.spark.tasks.watchdog import limit_of_part
from custody.verbs.pipelines import BatchReport, DriverVerbs


def parsed(schema: str | None, what: str = "schema") -> StructType | None:
    """The schema of a pipeline, parsed; this needs a session."""
    if schema is None:
        return None
    try:
        fields = cast("StructType", StructType.fromDDL(schema))
    except PySparkException as error:
        raise InvalidArgument(
            f"the {what} {schema!r} is invalid: {described(error)}",
            "Write the fields as in SQL: 'sku string, add int'.",
        ) from error
    taken = [field.name for field in fields if field.name.startswith("_")]
    if taken:
        raise InvalidArgument(
            f"the {what} has a field {taken[0]!r}", "Rename it: names with a leading underscore are Custody's."
        )
    return fields


def parsed_state(kind: StateType | None) -> StateType | None:
    """The type of a pipeline's states; a text is parsed, which needs a session."""
    if kind is None or not isinstance(kind.kind, str):
        return kind
    fields = parsed(kind.kind, "schema of the state")
    assert fields is not None
    return kind.parsed(fields.jsonValue())


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is known about a pipeline before it runs."""

    schema: StructType | None
    narrow: bool
    """Whether the frame keeps rows in their tasks and in order."""
    state: StateType | None


def shape_of(pipeline: Pipeline, spark: SparkSession) -> Shape:
    """Refuses an invalid schema, and a frame that cannot be run batch by batch. Changes nothing."""
    schema = parsed(pipeline.schema)
    narrow = pipeline.transform is not None and check(
        spark, pipeline.transform, schema, published=bool(pipeline.sinks), keeps=bool(pipeline.outside)
    )
    return Shape(schema=schema, narrow=narrow, state=parsed_state(pipeline.state))


@dataclass(kw_only=True)
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
    whole_tasks: bool = True
    """Each task has done everything for the messages that it read, in every job so far."""

    def work(self, batch: DataFrame, *, careful: bool, unproven: bool = False) -> tuple[int, BatchReport] | None:
        """The claim's number and the outcomes of its messages. None if the batch has no messages.

        `unproven`: no message was done since the start, so the code may be wrong.

        The number always comes with the rows: guessing the claim in flight could settle another one.
        """
        task = self._task(replace(self.job, careful=careful, unproven=unproven))
        if task is not None:
            if self.job.keeps:
                schemas = [parsed(sink.schema) for sink in self.pipeline.outside]
                results = self.kept.handled(batch.mapInArrow(task, KEEPING), schemas)
            else:
                results = batch.mapInArrow(task, RESULT)
            claim, work, _ = gather(results.toArrow())
            return None if claim is None else (claim, work)
        if batch._jdf.queryExecution().toRdd().getNumPartitions() == 0:
            return None
        number = self.drive.in_flight()
        if number is None:
            raise ClaimLost("the claim of the batch is no longer in flight")
        try:
            work = self._whole(batch, number)
        except Exception as error:
            if fault(error) != "row" or self.stopping():
                raise
            self.trouble(f"a row breaks the batch; running it in parts to find the row ({described(error)})")
            messages = self.drive.by_key(number)
            if not messages:
                raise ClaimLost(f"claim {number} is no longer in flight") from error
            isolation = Isolation(
                run=lambda part: self._part(number, part),
                slices=None if isinstance(error, TookTooLong) else self._slicing(number),
                stopping=self.stopping,
                unproven=unproven,
            )
            return number, isolation.of(messages)
        work.exact = self.shape.narrow and not work.failed
        work.ran = sum(part.messages for part in self.drive.claimed(number))
        return number, work

    def _task(self, job: Job) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] | None:
        """For `mapInArrow`: runs the handler over referenced messages. None for a frame."""
        if self.pipeline.handler is not None:
            return each.task(job, self.pipeline.handler)
        if self.pipeline.batch_handler is not None:
            return batches.task(job, self.pipeline.batch_handler)
        return None

    def _whole(self, batch: DataFrame, number: int) -> BatchReport:
        """The job over all messages of the claim."""
        # elsewhere a second attempt may be speculative, or replace a lost executor's, which is no row's fault
        retry: Literal["run", "refuse", "skip"] = "skip" if self._can_skip else "refuse"
        with self.watch.job("the frame", self.job.handler_timeout):
            found = self._framed(batch, number, retry=retry if runs_here(self.spark.sparkContext) else "run")
        if found.broken:
            told = [error for _, error in self.watch.failures()]
            raise decisive(told) or TaskFailed("one of its tasks failed")
        return found.work

    @property
    def _can_skip(self) -> bool:
        """Whether a second attempt of a task can leave out what the first one failed with.

        Not with sinks outside: Spark may have cached the rows of the first attempt.
        """
        return self.whole_tasks and not self.job.keeps and attempts(self.spark.sparkContext) > 1

    def _slicing(self, number: int) -> Callable[[list[list[Reference]]], Sliced] | None:
        """Runs many parts of a claim in one job, if the plan of the frame allows it."""
        if not self._can_skip:
            return None

        def run(parts: list[list[Reference]]) -> Sliced:
            start = randrange(1 << 60)  # so that the plan shows that these are the rows that it reads
            rows = self.spark.range(start, start + len(parts), 1, len(parts))
            limit = limit_of_part(self.job.handler_timeout, len(parts))
            with self._timed(f"the frame over {len(parts)} parts", limit):
                found = self._framed(rows, number, retry="skip", parts=parts)
            if not found.broken:
                return Sliced(found.work, {})
            failures = self.watch.failures()
            decided = decisive([error for _, error in failures])
            if decided is not None and fault(decided) != "row":
                raise decided
            first = dict(reversed(failures))
            return Sliced(found.work, {number: first.get(number) for number in found.broken})

        return run

    def _framed(
        self,
        batch: DataFrame,
        number: int,
        *,
        retry: Literal["run", "refuse", "skip"],
        parts: list[list[Reference]] | None = None,
    ) -> Gathered:
        """One job: runs the frame over the referenced messages, or over these parts, and stages its rows.

        `retry`: what a second attempt of a task does (see Job). One is refused instead of skipped after a shuffle.
        """
        job = replace(self.job, retry=retry, only=number)
        slices = None if parts is None else [_slice(number, part) for part in parts]
        staged = self._rows(batch, job, slices).mapInArrow(frame.stager(job, number), RESULT)
        if retry == "skip" and not is_one_stage(staged, batch):
            self.whole_tasks = False
            if parts is not None:
                raise TaskFailed("the tasks of the frame exchange rows")
            return self._framed(batch, number, retry="refuse")
        try:
            return gather(staged.toArrow())
        except Exception:
            if self.job.keeps:
                self.kept.forget()
            raise

    def _rows(self, batch: DataFrame, job: Job, slices: list[pa.RecordBatch] | None) -> DataFrame:
        """What tasks stage, of the messages that the batch refers to."""
        assert self.pipeline.transform is not None
        messages = batch.mapInArrow(reader(job, slices), EVENTS)
        try:
            result = self.pipeline.transform(frame.typed(messages, self.shape.schema))
        except PySparkException:
            raise
        except Exception as error:  # raised in the driver, before any row is processed
            raise NotTheRows(f"the frame raised {type(error).__name__}: {error}") from error
        rows = frame.outputs(result, published=bool(self.job.sinks), keeps=self.job.keeps)
        return self.kept.framed(rows).drop(DATA) if self.job.keeps else rows

    def _part(self, number: int, part: list[Reference]) -> BatchReport:
        rows = self.spark.createDataFrame(references(number, sorted(part))).coalesce(1)
        with self._timed(_named(part), limit_of_part(self.job.handler_timeout, len(part))):
            refuse = len(part) > 1 and runs_here(self.spark.sparkContext)
            return self._framed(rows, number, retry="refuse" if refuse else "run").work

    @contextmanager
    def _timed(self, what: str, limit: float | None) -> Iterator[None]:
        try:
            with self.watch.job(what, limit):
                yield
        except TookTooLong:
            self.drive.keep()  # if the database does not answer, every job waits, which is no row's fault
            raise


def _slice(number: int, part: list[Reference]) -> pa.RecordBatch:
    return references(number, sorted(part)).combine_chunks().to_batches()[0]


def _named(part: list[Reference]) -> str:
    if len(part) != 1:
        return f"the frame over {len(part)} messages"
    return f"the frame over partition {part[0][0]}, offset {part[0][1]}"
