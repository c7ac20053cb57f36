"""Writes a batch to sinks outside of the database: stages it before the commit and makes it visible after it.

PostgreSQL records which writes were begun, so that the next driver finishes or removes what a dead one has left. Runs
in the driver.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from pyspark.sql import DataFrame, SparkSession

from custody.errors import PipelineRefused
from custody.spark.faults import fault
from custody.spark.outside.cached_rows import CachedRows
from custody.spark.outside.refusals import Refusals, SinkTrouble, is_refusal, not_repeatable, stopped
from custody.spark.outside.sinks import Outside, RowsRefused, SinkDown, Write
from custody.spark.pipeline import Pipeline
from custody.verbs.pipelines import BatchReport, DriverVerbs


@dataclass(frozen=True, kw_only=True)
class StagedWrites:
    """The sinks outside of one pipeline, for one driver."""

    pipeline: Pipeline
    spark: SparkSession
    drive: DriverVerbs
    stopping: Callable[[], bool]
    trouble: Callable[[str], None]

    def stage(
        self, number: int, work: BatchReport, kept: CachedRows, *, isolate: bool
    ) -> tuple[BatchReport, int | None]:
        """Before the commit: writes the results of the messages that will be done, and counts them (None without
        sinks).

        Raises SinkTrouble if a sink does not accept them. With `isolate` it finds the messages that the sink refuses,
        which have failed in the returned work.
        """
        sinks = self.pipeline.outside
        if not sinks:
            return work, None
        isolated: set[int] = set()
        while True:
            write = self._write(number, self.drive.driver.epoch)
            due = self.drive.begin_write(number, work, write.token, [sink.name for sink in sinks if sink.shows])
            some = any(work.kept.values())
            for place, sink in enumerate(sinks):
                if not some and sink.shows:
                    continue  # without rows there is nothing to show; a function is called anyway
                rows = kept.rows(place, work.kept, due)
                try:
                    sink.stage(rows, write)
                except RowsRefused as refused:
                    work = _without(work, refused.report)
                    break
                except SinkDown as error:
                    raise SinkTrouble(sink, number, error) from error
                except Exception as error:
                    if fault(error) == "pipeline":
                        raise stopped(sink, number, error) from error
                    if not is_refusal(error):
                        raise
                    if place in isolated:
                        raise not_repeatable(sink, number, error) from error
                    if not isolate:
                        raise SinkTrouble(sink, number, error) from error
                    isolated.add(place)
                    work = _without(work, self._refused(sink, number, rows, error))
                    break
            else:
                return work, sum(last - first for one in due for first, last in one.done)

    def _refused(self, sink: Outside, number: int, rows: DataFrame, error: Exception) -> BatchReport:
        refusals = Refusals(
            sink=sink,
            claim=number,
            rows=rows,
            # with its own token: files of a trial never become visible, and are removed with the claim
            write=lambda some: sink.stage(some, self._write(number, self.drive.driver.epoch)),
            stopping=self.stopping,
            trouble=self.trouble,
        )
        return refusals.found(error)

    def abandon(self) -> None:
        """After a failed batch: lets go of what its sinks hold open."""
        for sink in self.pipeline.outside:
            sink.abandon(self._uid)

    def finish(self) -> None:
        """Makes committed writes visible and removes the others, of this driver and of those before it."""
        sinks = {sink.name: sink for sink in self.pipeline.outside if sink.shows}
        for begun in self.drive.open_writes():
            missing = [name for name in begun.sinks if name not in sinks]
            if missing and begun.committed:
                raise PipelineRefused(
                    f"claim {begun.claim} is committed, but its results are not visible yet in: {', '.join(missing)}",
                    "Run the pipeline once more with that sink before you remove it.",
                )
            for name in missing:
                self.trouble(f"claim {begun.claim} was not committed; its staged results in {name} are left there")
            for sink in (sinks[name] for name in begun.sinks if name in sinks):
                write = self._write(begun.claim, begun.epoch, begun.token)
                if begun.committed:
                    sink.show(self.spark, write)
                sink.clear(self.spark, write)
            self.drive.end_write(begun.claim)

    @property
    def _uid(self) -> str:
        uid = self.drive.driver.uid
        assert uid is not None
        return uid

    def _write(self, claim: int, epoch: int, token: str | None = None) -> Write:
        token = token or secrets.token_hex(8)
        return Write(pipeline=self.pipeline.name, uid=self._uid, claim=claim, epoch=epoch, token=token)


def _without(work: BatchReport, refused: BatchReport) -> BatchReport:
    """The outcomes of a claim of which a sink refuses some messages. The commit skips what these staged for topics."""
    left = {partition: [*offsets] for partition, offsets in work.left.items()}
    for partition, offsets in refused.left.items():
        left.setdefault(partition, []).extend(offsets)
    return replace(work, failed=work.failed | refused.failed, left=left, exact=False)
