"""The batches of a pipeline, each until its claim is committed, lost, or a newer driver's; and what they came to.

What rows do is isolated and charged to them; what the infrastructure does is waited out. Runs in the driver, within
`foreachBatch`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, NamedTuple

from pyspark.sql import DataFrame

from custody.engine import Custody
from custody.errors import (
    ClaimLost,
    CustodyError,
    PipelineFailed,
    QueueFull,
    StageLost,
    TopicChanged,
    Transient,
)
from custody.model.outcomes import Outcome
from custody.spark.causes import PAUSED, Beginning
from custody.spark.driver.batch_jobs import BatchJobs
from custody.spark.driver.reporting import Report
from custody.spark.faults import GONE, described, fault, ours, worker_died
from custody.spark.figures import Batch
from custody.spark.outside.refusals import SinkTrouble
from custody.spark.outside.staged_writes import StagedWrites
from custody.spark.settings import RunSettings
from custody.spark.tasks.job import Job
from custody.verbs.pipelines import Committed, Drive, Part, Work

logger = logging.getLogger(__name__)

RESTARTS = 8
"""Failures in a row, without a batch committed in between, after which a pipeline gives up."""
KILLERS = 100
"""The same for batches whose Python workers die: each time that comes closer to the message which does it."""


class Overflow(NamedTuple):
    """A partition of a topic would get more messages of one batch than it can ever hold."""

    topic: str
    messages: int
    holds: int

    def __str__(self) -> str:
        return f"{self.messages:,} for one partition of {self.topic!r}, which holds {self.holds:,}"


class BatchTooLarge(Exception):
    """A batch that its sink can never take as a whole: it is given back, to be claimed in smaller ones."""

    def __init__(self, claimed: int, overflow: Overflow) -> None:
        self.fitting = max(1, claimed * overflow.holds // overflow.messages // 2)
        super().__init__(f"{claimed:,} messages have {overflow}: claims take at most {self.fitting:,} from now on")


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What a driver works with, from one take-over of its pipeline to the next."""

    drive: Drive
    job: Job
    jobs: BatchJobs
    writes: StagedWrites


class Settlement:
    """Settles the batches of one run of a pipeline, over all its epochs."""

    def __init__(
        self,
        name: str,
        c: Custody,
        settings: RunSettings,
        *,
        ending: Event,
        report: Report,
        trouble: Callable[[str], None],
    ) -> None:
        self._name, self._c, self._report, self._trouble = name, c, report, trouble
        self._settings, self._stop, self._ending = settings, settings.stop, ending
        self._one_pass, self._pauses = settings.one_pass, settings.pause_if_all_fail
        self._beginning = Beginning()
        self.max_per_batch = settings.max_per_batch
        """What a claim may take: less than was set, once a batch has turned out to be too large for its sink."""
        self.fatal: CustodyError | None = None
        """What no restart mends: a newer driver, or an error of the pipeline itself."""
        self.failures = 0
        """In a row, without a batch committed in between."""
        self.batches = 0
        self.totals = Committed(False, 0, 0, 0, 0, 0, 0, 0, 0)

    @property
    def exhausted(self) -> bool:
        """Whether there were more failures in a row than are borne."""
        return self.failures > RESTARTS

    def settle(self, epoch: Epoch, references: DataFrame, batch_id: int) -> None:
        """Runs the batch, again if it has to be. Raises when only a new start of the query can help, or nothing."""
        pause, started, careful, refused = 0.2, time.monotonic(), False, False
        while True:
            if self._stop.is_set() or self._ending.is_set():
                raise InterruptedError("stopped before its commit")  # so that Spark does not take it for done
            try:
                unproven = self._pauses and not self._beginning.over
                found = epoch.jobs.work(references, careful=careful, unproven=unproven)
                if found is not None:
                    number, work = found
                    if unproven:
                        self._require_sound(epoch.drive, number, work)
                    committed = self._commit(epoch, number, work, batch_id, isolate=refused)
                    took = time.monotonic() - started
                    self._count(Batch(pipeline=self._name, claim=number, committed=committed, took=took))
                return
            except BatchTooLarge as error:
                self.max_per_batch = error.fitting
                raise
            except Exception as error:
                if self._stop.is_set() or self._ending.is_set():
                    raise InterruptedError("stopped before its commit") from None
                known = ours(error)
                if isinstance(known, ClaimLost):
                    logger.debug("%s: %s", self._name, known)
                    return
                if isinstance(error, GONE) or isinstance(known, TopicChanged):
                    raise  # a new start looks at the topics anew
                self.fatal = self._beyond_help(error, known)
                if self.fatal is not None:
                    raise
                self.failures += 1
                refused = refused or isinstance(error, SinkTrouble)
                down = isinstance(error, SinkTrouble) and error.down and not self._one_pass
                bearable = down or (self.failures <= KILLERS if worker_died(error) else not self.exhausted)
                if not bearable and not isinstance(known, Transient):
                    raise
                careful = careful or worker_died(error)
                reason = str(error) if isinstance(error, SinkTrouble) else described(error)
                self._report.failed(reason, self.failures)
                self._trouble(f"the batch is run again in {pause:g} s: {reason}")
                self._stop.wait(pause)
                pause = min(pause * 2, 10.0)
            finally:
                epoch.jobs.kept.clear()

    def _beyond_help(self, error: Exception, known: CustodyError | None) -> CustodyError | None:
        """The error with which the pipeline has to end, if it would fail in the same way for ever."""
        if known is not None and not isinstance(known, Transient):
            return known
        if fault(error) == "pipeline":
            return PipelineFailed(f"pipeline {self._name} cannot be run: {described(error)}")
        return None

    def _require_sound(self, drive: Drive, number: int, work: Work) -> None:
        """Pauses the group and ends the run if every message since the start has failed alike. Nobody is charged."""
        if not work.failed:
            self._beginning.over = not work.left
            return
        wrong = self._beginning.wrong(work, sum(part.messages for part in drive.claimed(number)))
        if wrong is not None:
            topic, group = drive.driver.topic, drive.driver.group
            self._c.pause(topic, group, reason=f"{PAUSED}every message fails with {wrong}"[:1000])
            raise PipelineFailed(
                f"pipeline {self._name} is paused, because every message since its start fails with {wrong}",
                "Mend the code and start the pipeline again, which ends the pause: no message was charged. If the "
                "messages are to blame, run it with pause_if_all_fail=False (--no-pause).",
            )

    def _commit(self, epoch: Epoch, number: int, work: Work, batch_id: int, *, isolate: bool) -> Committed:
        """Until it is known to have happened: a repeat changes nothing."""
        pause = 0.1
        query_id = epoch.jobs.spark.sparkContext.getLocalProperty("sql.streaming.queryId")
        work, done = epoch.writes.stage(number, work, epoch.jobs.kept, isolate=isolate)
        while True:
            try:
                committed = epoch.drive.commit(number, work, done=done, query_id=query_id, batch_id=batch_id)
                break
            except StageLost:
                raise
            except Transient as error:
                if self._stop.is_set():
                    raise
                full = isinstance(error, QueueFull)
                overflow = self._overflow(epoch.job, work) if full else None
                if overflow is not None:
                    parts = epoch.drive.claimed(number)
                    claimed = sum(part.messages for part in parts)
                    if claimed > 1:
                        raise BatchTooLarge(claimed, overflow) from error
                    work = _failed_alone(work, parts, overflow)
                    work, done = epoch.writes.stage(number, work, epoch.jobs.kept, isolate=isolate)
                self._trouble(f"{'the sink is full' if full else 'the commit is tried again'}: {error}")
                self._stop.wait(pause)
                pause = min(pause * 2, 5.0)
        self._c.hint(epoch.job.sinks)
        with suppress(CustodyError):  # it is only tidied up
            epoch.drive.drop_stage(number)
        return committed

    def _overflow(self, job: Job, work: Work) -> Overflow | None:
        """What of the batch would not fit its sink even if that were empty."""
        for name, (topic_id, *_) in job.sinks.items():
            holds = self._c.topic(name).max_depth
            counts: Counter[int] = Counter()
            for placed in work.placed:
                counts[placed.partition] += placed.messages if placed.topic_id == topic_id else 0
            largest = max(counts.values(), default=0)
            if holds is not None and largest > holds:
                return Overflow(name, largest, holds)
        return None

    def _count(self, batch: Batch) -> None:
        self.failures = 0
        self.batches += 1
        self._report.goes_well()
        counts: dict[str, Any] = {
            name: getattr(self.totals, name) + getattr(batch.committed, name)
            for name in ("messages", "done", "failed", "dead", "later", "released", "lost", "outputs")
        }
        self.totals = Committed(repeated=False, **counts)
        self._settings.tell(self._settings.on_batch, batch)


def _failed_alone(work: Work, parts: Sequence[Part], overflow: Overflow) -> Work:
    """The work of a claim of one message, whose results do not fit even by themselves: it has failed."""
    outcome = Outcome("nack", error=f"its results are {overflow}")
    failed = {(part.partition, part.ranges[0][0]): outcome for part in parts}
    return replace(work, failed=failed, placed=[], exact=False)
