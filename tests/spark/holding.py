"""Tasks that are held when they have staged their outputs and not yet said so: the middle of a batch, from outside.

The driver wraps what it sends to executors, and the wrapper travels by value. Marks are files in a directory that every
process of this machine sees.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

from custody.spark.tasks import each, frame

Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

ANOTHER = "another"
LONGEST = 100.0
_sent = (each.task, frame.stager)


def tasks(marks: str, host: str | None, until: str) -> None:
    """Runs in the driver: from now on tasks are held, everywhere or on a host, until the mark of that name is set.

    ANOTHER is set when two attempts of some task have staged.
    """
    make, stager = _sent
    held = partial(Held, marks=marks, host=host, until=until)
    each.task = lambda *given, **named: held(make(*given, **named))  # type: ignore[assignment]
    frame.stager = lambda *given, **named: held(stager(*given, **named))  # type: ignore[assignment]


def let_go() -> None:
    each.task, frame.stager = _sent


class Held:
    """Runs in executors."""

    def __init__(self, task: Task, *, marks: str, host: str | None, until: str) -> None:
        self._task, self._marks, self._host, self._until = task, marks, host, until

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for report in self._task(batches):
            if report.num_rows:
                self._staged()
            yield report

    def _staged(self) -> None:
        context: Any = TaskContext.get()
        marks, host = Path(self._marks), os.environ["SPARK_LOCAL_IP"]
        attempt = f"{context.stageId()}.{context.partitionId()}"
        (marks / f"staged {attempt}.{context.attemptNumber()} on {host}").touch()
        if len(list(marks.glob(f"staged {attempt}.*"))) > 1:
            (marks / ANOTHER).touch()
        if self._host not in (None, host):
            return
        (marks / f"held {host}").touch()
        give_up = time.monotonic() + LONGEST
        while not (marks / self._until).exists():
            if time.monotonic() > give_up:
                raise TimeoutError("nobody lets this task go")
            time.sleep(0.01)
