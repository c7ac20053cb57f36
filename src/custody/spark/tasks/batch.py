"""Runs a handler over batches of messages in an executor's Python process. One task reads, handles and stages.

As in `each`, messages of a key keep their order, a failure releases the later ones of its key, and results are
published only if the driver's commit names this attempt. `halving` gives each message of a call its outcome.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import pyarrow as pa
from pyspark import TaskContext

from custody.model.policy import seconds_or_none
from custody.spark.batch_handlers import BatchHandler
from custody.spark.database.tasks import Holding, Stage, TaskClaim
from custody.spark.tasks.calls import Calls
from custody.spark.tasks.each import BLOCK, HUNG, KILLED, TOO_LONG, cleared, run_task
from custody.spark.tasks.events import Events, frame_columns
from custody.spark.tasks.halving import Outcomes
from custody.spark.tasks.job import Job, Report, rows_batch
from custody.spark.tasks.results import Placing
from custody.spark.tasks.watchdog import Watchdog, limit_of_part


def task(job: Job, handler: BatchHandler) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow`: references in, the task's report out."""
    return run_task(job, partial(Attempt, job, handler))


class Attempt:
    """One attempt of a task on its messages of a claim."""

    def __init__(self, job: Job, handler: BatchHandler, claim: int) -> None:
        context = TaskContext.get()
        self._job, self._claim, self._rows = job, claim, handler.rows
        self._stage: Stage = job.claim(claim).stage()
        self._report = Report()
        self._calls = Calls(job, handler, self._timed)
        self._ran = 0
        self._unmet: Counter[str] = Counter()
        self._kept: list[tuple[int, int, str | None, str]] = []
        self._holds = Holding(job.claim(claim))
        self._blocks: Blocks | None = None
        self._watchdog = Watchdog.of_this_process()
        self._watchdog.begin(job, claim)
        if job.handler_timeout is not None:
            signal.signal(signal.SIGALRM, _too_long)
        if job.careful or (context is not None and context.attemptNumber() > 0):
            self._blocks = Blocks(job.claim(claim), self._stage.attempt)

    def take(self, events: Events) -> None:
        """Runs these messages in order."""
        messages = frame_columns(events)
        for first in range(0, messages.num_rows, self._rows):
            rows = messages.slice(first, self._rows)
            if self._blocks is None:
                self._run(rows, {})
                continue
            for start, size, error in self._blocks.cut(events.partition, rows.column("_offset").to_pylist()):
                self._run(rows.slice(start, size), {} if error is None else {0: error})

    def _run(self, messages: pa.RecordBatch, ended: dict[int, str]) -> None:
        partition, offsets = messages.column("_partition")[0].as_py(), messages.column("_offset").to_pylist()
        if not self._holds(partition):
            self._calls.leave(messages)
            for offset in offsets:
                self._report.left(partition, offset)
            return
        self._record(partition, offsets, self._calls.of(messages, ended))

    def _record(self, partition: int, offsets: list[int], found: Outcomes[Placing]) -> None:
        """Stages the outputs of the messages that are done, and reports the others."""
        self._ran += len(found.done)
        self._unmet.update(found.unmet)
        for row in sorted(found.done):  # a row that was called early is in its place again
            for topic, place, encoded in found.done[row]:
                if topic is not None:
                    self._stage.add(topic, place, (partition, offsets[row]), encoded)
                if self._job.keeps and topic is self._calls.first:
                    self._kept.append((partition, offsets[row], encoded[0], encoded[2].decode()))
        for row, (outcome, cause) in found.failed.items():
            self._report.failed(partition, offsets[row], outcome, seconds_or_none(outcome.delay), cause)
        for row in found.left:
            self._report.left(partition, offsets[row])

    def _timed(self, handler: BatchHandler, rows: pa.RecordBatch, again: bool) -> object:
        """Calls the handler, and interrupts it when it takes too long. Parts of several messages have less time."""
        partial_call = again or self._blocks is not None
        limit = limit_of_part(self._job.handler_timeout, rows.num_rows if partial_call else 1)
        self._watchdog.allow(limit)
        self._watchdog.runs(
            rows.column("_partition")[0].as_py(), rows.column("_offset")[0].as_py(), alone=rows.num_rows == 1
        )
        try:
            signal.setitimer(signal.ITIMER_REAL, limit or 0)
            return handler(rows)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._watchdog.idle()

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Stages the outputs, and returns the report of the outcomes and the rows for sinks outside."""
        self._report.placed(self._stage.write())
        self._report.ran(self._claim, self._ran)
        self._report.unmet(self._unmet)
        if self._blocks is not None:
            self._blocks.finished()
        if self._job.keeps:
            self._report.kept(self._stage.attempt, len(self._kept))
            yield rows_batch(self._stage.attempt, self._kept)
        yield self._report.batch(keeps=self._job.keeps)

    def give_up(self) -> None:
        """The database failed, not a message: clears the last note, so that its messages are not suspected."""
        if self._blocks is not None:
            cleared(self._blocks.finished)

    def rest(self) -> None:
        """This attempt runs no more messages."""
        self._watchdog.idle()


class Blocks:
    """Finds a message that ends its process: records blocks of messages before they run. After an attempt died in a
    block, each message of it runs alone."""

    def __init__(self, claim: TaskClaim, attempt: int) -> None:
        self._claim, self._attempt = claim, attempt
        self._suspects: dict[tuple[int, int], int] = {}
        alone: Counter[tuple[int, int]] = Counter()
        for partition, offset, size in claim.suspected():
            # Spark also ends healthy workers, when another task fails the job, so a message must have died alone twice
            alone[partition, offset] += size == 1
            self._suspects[partition, offset] = max(size, self._suspects.get((partition, offset), 2))
        self._ended = {where: KILLED for where, times in alone.items() if times > 1}
        self._ended |= {(late.partition, late.offset): HUNG for late in claim.overdue() if late.stopped}
        self._singly = 0

    def cut(self, partition: int, offsets: list[int]) -> Iterator[tuple[int, int, str | None]]:
        """First row and number of rows of each call, and the error of a message that must not run again."""
        first = 0
        while first < len(offsets):
            where = (partition, offsets[first])
            self._singly = max(self._singly, self._suspects.get(where, 0))
            error = self._ended.get(where)
            size = 1 if error is not None or self._singly else self._free(partition, offsets, first)
            if error is None:
                self._claim.note_suspect(self._attempt, *where, size)
            yield first, size, error
            self._singly = max(0, self._singly - size)
            first += size

    def finished(self) -> None:
        self._claim.note_suspect(self._attempt, 0, 0, 0)

    def _free(self, partition: int, offsets: list[int], first: int) -> int:
        """The number of messages up to the next suspected one."""
        size = 1
        while size < BLOCK and first + size < len(offsets):
            where = (partition, offsets[first + size])
            if where in self._suspects or where in self._ended:
                break
            size += 1
        return size


def _too_long(_signal: int, _frame: FrameType | None) -> None:
    raise TimeoutError(TOO_LONG)
