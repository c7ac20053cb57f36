"""Workers run on the real clock, each in a thread of the test's, and are stopped whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.databases import Copy, Kept

import custody
from custody.worker import Worker, WorkerSummary


@pytest.fixture
def live(database: Kept | Copy) -> Iterator[custody.Custody]:
    """Custody on a fresh database and the server's own clock."""
    with database.custody(worker="live") as opened:
        yield opened


class Running:
    """A worker at work in a thread."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.summary: WorkerSummary | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.summary = self.worker.run()

    def stop(self) -> WorkerSummary:
        self.worker.stop()
        self._thread.join(30)
        assert self.summary is not None, "the worker did not stop within 30 s"
        return self.summary


Start = Callable[..., Running]


@pytest.fixture
def start(live: custody.Custody) -> Iterator[Start]:
    started: list[Running] = []

    def begin(topic: str, group: str, handler: Any, *, on: custody.Custody | None = None, **settings: Any) -> Running:
        running = Running((on or live).worker_for(topic, group, handler, **settings))
        started.append(running)
        return running

    yield begin
    for running in started:
        running.worker.stop()
    for running in started:
        running.stop()
