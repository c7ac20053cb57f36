"""Runs each batch of a pipeline until its claim is committed, lost, or taken over by a newer driver.

Failures of rows are isolated and counted; failures of the infrastructure are retried. Runs in the driver, within
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
from typing import NamedTuple

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
from custody.verbs.pipelines import BatchReport, Committed, DriverVerbs, Part

logger = logging.getLogger(__name__)

RESTARTS = 8
"""Failures in a row, without a committed batch in between, after which a pipeline gives up."""
CAREFUL = 100
"""Batches that are careful after one whose Python worker died."""
KILLERS = 100
"""The same for batches whose Python workers die: each time that comes closer to the message which does it."""
FIRST_PAUSE = 0.2
"""Seconds until a batch that failed is run again; the next time twice as many."""


class Overflow(NamedTuple):
    """One batch has more messages for a partition of a topic than the topic's max_depth."""

    topic: str
    messages: int
    holds: int

    def __str__(self) -> str:
        return f"{self.messages:,} for one partition of {self.topic!r}, which holds {self.holds:,}"


class BatchTooLarge(Exception):
    """A batch that its sink can never take as a whole. It is released, and claimed again in smaller ones."""

    def __init__(self, claimed: int, overflow: Overflow) -> None:
        self.fitting = max(1, claimed * overflow.holds // overflow.messages // 2)
        super().__init__(
            f"the outputs of {claimed:,} messages are {overflow}: from now on a claim has at most "
            f"{self.fitting:,} messages"
        )


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What a driver works with during one epoch."""

    drive: DriverVerbs
    job: Job
    jobs: BatchJobs
    writes: StagedWrites


class Settlement:
    """Processes the batches of one run of a pipeline, across its epochs."""

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
        """Most messages of a claim: less than the setting after a batch was too large for its sink."""
        self.fatal: CustodyError | None = None
        """An error that no restart can fix: a newer driver, or an error of the pipeline itself."""
        self.failures = 0
        """Failures in a row, without a committed batch in between."""
        self.batches = 0
        self._careful_until = 0
        """Until which batch tasks record what they run: a message that ended a Python process comes again."""
        self.totals = Committed()
        self.unmet: Counter[str] = Counter()

    @property
    def exhausted(self) -> bool:
        """Whether there were too many failures in a row."""
        return self.failures > RESTARTS

    def settle(self, epoch: Epoch, references: DataFrame, batch_id: int) -> None:
        """Runs the batch, again if it has to be. Raises when only a new start of the query can help, or nothing."""
        pause, started, refused = FIRST_PAUSE, time.monotonic(), False
        while True:
            if self._stop.is_set() or self._ending.is_set():
                raise InterruptedError("stopped before its commit")  # so that Spark does not count it as done
            try:
                unproven = self._pauses and not self._beginning.over
                found = epoch.jobs.work(references, careful=self.batches < self._careful_until, unproven=unproven)
                if found is not None:
                    number, work = found
                    if unproven:
                        self._require_sound(epoch.drive, number, work)
                    committed = self._commit(epoch, number, work, batch_id, isolate=refused)
                    took = time.monotonic() - started
                    unmet = {} if committed.repeated else dict(sorted(work.unmet.items()))
                    self._count(Batch(pipeline=self._name, claim=number, committed=committed, took=took, unmet=unmet))
                return
            except BatchTooLarge as error:
                self.max_per_batch = error.fitting
                raise
            except Exception as error:
                epoch.writes.abandon()
                if self._stop.is_set() or self._ending.is_set():
                    raise InterruptedError("stopped before its commit") from None
                known = ours(error)
                if isinstance(known, ClaimLost):
                    logger.debug("%s: %s", self._name, known)
                    return
                if isinstance(error, GONE) or isinstance(known, TopicChanged):
                    raise  # a restart reads the topics again
                self.fatal = self._beyond_help(error, known)
                if self.fatal is not None:
                    raise
                self.failures += 1
                refused = refused or isinstance(error, SinkTrouble)
                down = isinstance(error, SinkTrouble) and error.down and not self._one_pass
                bearable = down or (self.failures <= KILLERS if worker_died(error) else not self.exhausted)
                if not bearable and not isinstance(known, Transient):
                    raise
                if worker_died(error):
                    self._careful_until = self.batches + CAREFUL
                reason = str(error) if isinstance(error, SinkTrouble) else described(error)
                self._report.failed(reason, self.failures)
                self._trouble(f"retrying the batch in {pause:g} s: {reason}")
                self._stop.wait(pause)
                pause = min(pause * 2, 10.0)
            finally:
                epoch.jobs.kept.clear()

    def _beyond_help(self, error: Exception, known: CustodyError | None) -> CustodyError | None:
        """The error with which the pipeline has to end, if every retry would fail in the same way."""
        if known is not None and not isinstance(known, Transient):
            return known
        if fault(error) == "pipeline":
            return PipelineFailed(f"pipeline {self._name} cannot be run: {described(error)}")
        return None

    def _require_sound(self, drive: DriverVerbs, number: int, work: BatchReport) -> None:
        """Pauses the group and ends the run if all messages since the start failed alike. No failure is counted."""
        if not work.failed:
            self._beginning.over = not work.left
            return
        wrong = self._beginning.wrong(work, sum(part.messages for part in drive.claimed(number)))
        if wrong is not None:
            topic, group = drive.driver.topic, drive.driver.group
            self._c.pause(topic, group, reason=f"{PAUSED}every message fails with {wrong}"[:1000])
            raise PipelineFailed(
                f"pipeline {self._name} is paused, because every message since its start fails with {wrong}",
                "Fix the code and start the pipeline again, which resumes the group. No failure was counted. If the "
                "messages are wrong and not the code, use pause_if_all_fail=False (--no-pause).",
            )

    def _commit(self, epoch: Epoch, number: int, work: BatchReport, batch_id: int, *, isolate: bool) -> Committed:
        """Commits, and repeats it until it is known to have happened. The commit is idempotent."""
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
                self._trouble(f"{'the sink is full' if full else 'retrying the commit'}: {error}")
                self._stop.wait(pause)
                pause = min(pause * 2, 5.0)
        self._c.hint(epoch.job.sinks)
        with suppress(CustodyError):  # only a cleanup
            epoch.drive.drop_stage(number)
            if work.states:
                epoch.drive.drop_states(number)
        return committed

    def _overflow(self, job: Job, work: BatchReport) -> Overflow | None:
        """A partition that cannot hold the batch's messages even if it is empty; None if there is none."""
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
        before, added = vars(self.totals), vars(batch.committed)
        self.totals = Committed(**{name: before[name] + added[name] for name in before if name != "repeated"})
        self.unmet.update(batch.unmet)
        self._settings.tell(self._settings.on_batch, batch)


def _failed_alone(work: BatchReport, parts: Sequence[Part], overflow: Overflow) -> BatchReport:
    """The outcome of a claim of one message whose results are too many for its sink: a failure."""
    outcome = Outcome("nack", error=f"its results are {overflow}")
    failed = {(part.partition, part.ranges[0][0]): outcome for part in parts}
    return replace(work, failed=failed, placed=[], exact=False)
