"""Writing a batch to sinks outside of the database, around its commit: staged before it, shown after it.

PostgreSQL knows what was begun, so that whoever drives the pipeline next finishes or clears away what a dead driver has
left. Runs in the driver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pyspark.sql import SparkSession

from custody.errors import PipelineRefused
from custody.pipelines import Begun, Drive, Work
from custody.spark.keeping import Kept
from custody.spark.outside import Write
from custody.spark.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class Writing:
    """The sinks outside of one pipeline, for one driver."""

    pipeline: Pipeline
    spark: SparkSession
    drive: Drive
    trouble: Callable[[str], None]

    def stage(self, number: int, work: Work, kept: Kept) -> int | None:
        """Before the commit: the results of the messages that will be done. How many that are; None without sinks."""
        sinks = self.pipeline.outside
        if not sinks:
            return None
        due = self.drive.begin_write(number, work, [sink.name for sink in sinks])
        write, some = self._write(number, self.drive.driver.epoch), any(work.kept.values())
        for place, sink in enumerate(sinks):
            if some or sink.takes_nothing:
                sink.stage(kept.rows(place, work.kept, due), write)
            else:
                sink.discard(self.spark, write)  # an earlier run of the batch may have had something
        kept.check(work.kept)
        return sum(last - first for one in due for first, last in one.done)

    def finish(self) -> None:
        """Shows what was committed, and clears away what never will be: of this driver, and of those before it."""
        sinks = {sink.name: sink for sink in self.pipeline.outside}
        for begun in self.drive.open_writes():
            self._require_all(begun)
            for name in begun.sinks:
                if name not in sinks:
                    self.trouble(f"claim {begun.claim} was not committed; what it left in {name} stays there")
                elif begun.committed:
                    sinks[name].show(self.spark, self._write(begun.claim, begun.epoch))
                else:
                    sinks[name].discard(self.spark, self._write(begun.claim, begun.epoch))
            self.drive.end_write(begun.claim)

    def _write(self, claim: int, epoch: int) -> Write:
        return Write(pipeline=self.pipeline.name, claim=claim, epoch=epoch)

    def _require_all(self, begun: Begun) -> None:
        missing = set(begun.sinks) - {sink.name for sink in self.pipeline.outside}
        if missing and begun.committed:
            raise PipelineRefused(
                f"claim {begun.claim} is committed, but its results wait to be shown in: {', '.join(sorted(missing))}",
                "Run the pipeline once more with that sink before you take it away.",
            )
