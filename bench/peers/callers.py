"""Callers of a peer at the same time: threads of one process, or tasks of one event loop, as its client wants it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TypeVar

import uvloop

from bench.peers.peer import Done

T = TypeVar("T")

Step = Callable[[], int]
"""One call, and how many messages it was about; 0 if there are none left."""
AsyncStep = Callable[[], Awaitable[int]]


def in_threads(steps: Sequence[Step], seconds: float) -> Done:
    """Each step over and over, in a thread of its own."""
    start = threading.Barrier(len(steps))

    def run(step: Step) -> tuple[int, float, float]:
        start.wait()
        began = ended = perf_counter()
        messages = 0
        while ended < began + seconds and (done := step()):
            messages += done
            ended = perf_counter()
        return messages, began, ended

    with ThreadPoolExecutor(len(steps)) as threads:
        return _together([*threads.map(run, steps)])


async def in_tasks(steps: Sequence[AsyncStep], seconds: float) -> Done:
    """Each step over and over, in a task of its own."""

    async def run(step: AsyncStep) -> tuple[int, float, float]:
        began = ended = perf_counter()
        messages = 0
        while ended < began + seconds and (done := await step()):
            messages += done
            ended = perf_counter()
        return messages, began, ended

    return _together(await asyncio.gather(*map(run, steps)))


def _together(found: Sequence[tuple[int, float, float]]) -> Done:
    began, ended = min(one[1] for one in found), max(one[2] for one in found)
    return Done(sum(one[0] for one in found), ended - began)


def in_loop(work: Coroutine[object, object, T]) -> T:
    """Runs a load of tasks to its end, in an event loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class Handled:
    """Counts the messages that a worker's handlers get, from the first of them on: its start is not measured. The
    time of the load begins then, too."""

    def __init__(self, begin: Callable[[], object]) -> None:
        self.messages = 0
        self.began = 0.0
        self._begin = begin

    def one(self) -> None:
        """Called by each handler, in one thread."""
        if not self.messages:
            self.began = perf_counter()
            self._begin()
        self.messages += 1

    def done(self) -> Done:
        return Done(self.messages, perf_counter() - self.began if self.messages else 0.0)
