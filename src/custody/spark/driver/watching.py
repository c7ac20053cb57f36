"""Watches the jobs of a batch from a thread: reports those without progress, and cancels those that must end.

Spark kills the Python workers of a cancelled job within seconds, whatever they do. It cannot end JVM code that ignores
interrupts (a regular expression, a UDF in Scala): such a task keeps its core until Spark ends.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from custody.errors import CustodyError
from custody.spark.faults import TaskFailed, TookTooLong, decisive, is_second_try
from custody.verbs.pipelines import Overdue

logger = logging.getLogger(__name__)

SILENCE = 30.0
"""Seconds without progress until the first report; the next one comes after twice as long."""
_FIRST_LOOK = 3.0  # seconds; most batches end before and are never checked
_PERIOD = 0.5
_TASKS = 100_000  # tasks of a stage that are searched for failed ones


class Progress(NamedTuple):
    """Finished and running tasks of a batch."""

    finished: tuple[tuple[int, ...], ...]
    running: int


@dataclass
class _Step:
    """The current step of a batch."""

    what: str
    limit: float | None
    cancelled: bool = False


class Watch:
    """Watches the batches of one pipeline, one at a time. `overdue` returns messages that run for long."""

    def __init__(
        self,
        spark: SparkSession,
        *,
        trouble: Callable[[str], None],
        overdue: Callable[[], Sequence[Overdue]] = tuple,
        silence: float | None = None,
    ) -> None:
        self._context = spark.sparkContext
        self._trouble, self._overdue = trouble, overdue
        self._silence = SILENCE if silence is None else silence
        self._tag = f"custody-{secrets.token_hex(6)}"
        self._step = _Step("", None)

    @contextmanager
    def batch(self, what: str) -> Iterator[None]:
        """Watches a batch. Used in the thread that starts its jobs."""
        self._context.addJobTag(self._tag)
        self._step, ended = _Step(what, None), threading.Event()
        watcher = threading.Thread(target=self._look, args=[ended], name="custody watch", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            self._context.removeJobTag(self._tag)

    @contextmanager
    def job(self, what: str, limit: float | None) -> Iterator[None]:
        """A job of the batch. If it finishes no task within `limit` seconds, it is cancelled: `TookTooLong`."""
        before, self._step = self._step, _Step(what, limit)
        step = self._step
        try:
            yield
        except Exception as error:
            if step.cancelled:
                raise TookTooLong(f"{what} took longer than {limit:g} s (handler_timeout) and was cancelled") from error
            if is_second_try(error):
                raise (decisive([told for _, told in self.failures()]) or error) from error
            raise
        finally:
            self._step = before

    def cancel(self) -> None:
        """Cancels the running jobs; their batch fails."""
        self._context.cancelJobsWithTag(self._tag)

    def _look(self, ended: threading.Event) -> None:
        pause = min(_FIRST_LOOK, self._silence / 4)
        step, last = self._step, Progress((), 0)
        since = looked = time.monotonic()
        ran, silence = 0.0, self._silence
        while not ended.wait(pause):
            try:
                found = self._progress()
            except (Py4JError, PySparkException, OSError) as error:
                logger.debug("the jobs of a batch could not be checked: %s", error)
                return
            now = time.monotonic()
            if self._step is not step or found.finished != last.finished:
                step, since, ran, silence = self._step, now, 0.0, self._silence
            elif last.running and found.running:  # not while it waits for cores
                ran += now - looked
            looked, last = now, found
            if step.limit is not None and ran > step.limit and not step.cancelled:
                step.cancelled = True
                self.cancel()
            elif now - since >= silence:
                silence *= 2
                self._trouble(f"no progress for {now - since:.0f} s: {self._where(step, found)}")
            pause = min(_PERIOD, self._silence / 4, _PERIOD if step.limit is None else max(0.05, step.limit / 10))

    def _progress(self) -> Progress:
        tracker = self._context._jsc.sc().statusTracker()
        mine = {*tracker.getJobIdsForTag(self._tag)} & {*tracker.getActiveJobIds()}
        finished, running = [], 0
        for job in sorted(mine):
            for stage in _stages(tracker, job):
                finished.append((job, stage.stageId(), stage.numCompletedTasks(), stage.numFailedTasks()))
                running += stage.numActiveTasks()
        return Progress(tuple(finished), running)

    def failures(self) -> list[tuple[int, TaskFailed]]:
        """The failed task attempts of the last job, in order, each with the number of its task."""
        context = self._context._jsc.sc()
        context.listenerBus().waitUntilEmpty()  # failures arrive through it with a delay
        store, tracker = context.statusStore(), context.statusTracker()
        job = max(tracker.getJobIdsForTag(self._tag), default=None)
        found: list[tuple[int, int, str]] = []
        for stage in [] if job is None else _stages(tracker, job):
            tasks = store.taskList(stage.stageId(), stage.currentAttemptId(), _TASKS)
            for number in range(tasks.size()):
                task = tasks.apply(number)
                if task.status() == "FAILED" and task.errorMessage().isDefined():
                    found.append((task.taskId(), task.index(), task.errorMessage().get()))
        return [(number, TaskFailed(text)) for _, number, text in sorted(found)]

    def _where(self, step: _Step, found: Progress) -> str:
        try:
            late = [one for one in self._overdue() if not one.stopped]
        except CustodyError as error:
            return f"{step.what}, and the database does not answer ({error})"
        if late:
            one = late[0]
            more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
            where = f"partition {one.partition}, offset {one.offset}{more}"
            return f"{step.what} has been running for {one.seconds:.0f} s on {where}"
        if found.running:
            tasks = "1 task runs and has" if found.running == 1 else f"{found.running} tasks run and have"
            return f"{step.what}: {tasks} not finished"
        if found.finished:
            return f"{step.what}: no task has started; other jobs have all cores"
        return f"{step.what}: no job is running; the driver is working"


def _stages(tracker: Any, job: int) -> Iterator[Any]:
    info = tracker.getJobInfo(job)
    if info.isEmpty():
        return
    for number in info.get().stageIds():
        stage = tracker.getStageInfo(number)
        if not stage.isEmpty():
            yield stage.get()


def within(limit: float, what: Callable[[], object], name: str) -> bool:
    """Runs this in a thread and waits up to `limit` seconds. False if it has not ended; it is then left running."""
    thread = threading.Thread(target=what, name=name, daemon=True)
    thread.start()
    thread.join(limit)
    return not thread.is_alive()
