"""Writing a batch to sinks outside of the database, around its commit: staged before it, shown after it.

PostgreSQL knows what was begun, so that whoever drives the pipeline next finishes or clears away what a dead driver has
left. Runs in the driver.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from custody.errors import PipelineRefused
from custody.pipelines import Drive, Work
from custody.spark.outside.cached_rows import CachedRows
from custody.spark.outside.sinks import Write
from custody.spark.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class StagedWrites:
    """The sinks outside of one pipeline, for one driver."""

    pipeline: Pipeline
    spark: SparkSession
    drive: Drive
    trouble: Callable[[str], None]

    def stage(self, number: int, work: Work, kept: CachedRows) -> int | None:
        """Before the commit: the results of the messages that will be done. How many that are; None without sinks."""
        sinks = self.pipeline.outside
        if not sinks:
            return None
        write = self._write(number, self.drive.driver.epoch, secrets.token_hex(8))
        due = self.drive.begin_write(number, work, write.token, [sink.name for sink in sinks if sink.shows])
        some = any(work.kept.values())
        for place, sink in enumerate(sinks):
            if some or not sink.shows:  # without rows there is nothing to show; a function is told of it
                sink.stage(kept.rows(place, work.kept, due), write)
        return sum(last - first for one in due for first, last in one.done)

    def finish(self) -> None:
        """Shows what was committed, and clears away what never will be: of this driver, and of those before it."""
        sinks = {sink.name: sink for sink in self.pipeline.outside if sink.shows}
        for begun in self.drive.open_writes():
            missing = [name for name in begun.sinks if name not in sinks]
            if missing and begun.committed:
                raise PipelineRefused(
                    f"claim {begun.claim} is committed, but its results wait to be shown in: {', '.join(missing)}",
                    "Run the pipeline once more with that sink before you take it away.",
                )
            for name in missing:
                self.trouble(f"claim {begun.claim} was not committed; what it left in {name} stays there")
            for sink in (sinks[name] for name in begun.sinks if name in sinks):
                write = self._write(begun.claim, begun.epoch, begun.token)
                if begun.committed:
                    sink.show(self.spark, write)
                sink.clear(self.spark, write)
            self.drive.end_write(begun.claim)

    def _write(self, claim: int, epoch: int, token: str) -> Write:
        uid = self.drive.driver.uid
        assert uid is not None
        return Write(pipeline=self.pipeline.name, uid=uid, claim=claim, epoch=epoch, token=token)
