"""The watchdog of an executor's Python process: a child process that kills it when a handler hangs.

A handler that is stuck in C code, holds the interpreter or blocks signals cannot be interrupted from within. The
running message is recorded in shared memory. Before the watchdog kills the process, it records in the database which
message that was. The next attempt of the task then fails this message, and no other.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import time
import warnings
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

from custody.errors import CustodyError
from custody.spark.database.tasks import TaskClaim
from custody.spark.tasks.job import Job

SLOW = 15.0
"""Seconds after which a running message is recorded for the driver's reports; less if the timeout is short."""
_PERIOD = 0.5
_NOTING = 5.0  # timeout of a note in seconds: the process is killed even if the database does not answer
_SIZE = 1 << 16
# since when (monotonic seconds; 0: nothing runs), offset, partition, and whether the message runs alone
_RUN = struct.Struct("=dqi?")
_JOB = struct.Struct("=dqqi")  # seconds until the process is killed (0: never), claim, group, length of the URL
_URL = _RUN.size + _JOB.size


class _Seen(NamedTuple):
    since: float
    offset: int
    partition: int
    alone: bool


def margin(handler_timeout: float) -> float:
    """Seconds between the timeout and the kill, in which the handler is interrupted from within if that is possible."""
    return min(max(1.0, handler_timeout / 10), 10.0)


def limit_of_part(handler_timeout: float | None, messages: int) -> float | None:
    """How long a part of a batch may take. The shorter time for several messages only decides whether the part is
    divided further: a message fails only after it had the whole time alone."""
    if handler_timeout is None or messages <= 1:
        return handler_timeout
    return min(handler_timeout, max(handler_timeout / 10, 10.0))


class Watchdog:
    """The executor's side: writes to shared memory what runs."""

    _mine: Watchdog | None = None

    def __init__(self) -> None:
        self._worker = os.getpid()
        self._shared = mmap.mmap(-1, _SIZE)
        self._job = (0, 0, 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about Arrow's threads, which the child does not use
            child = os.fork()
        if child == 0:
            _watch(self._worker, self._shared)

    @classmethod
    def of_this_process(cls) -> Watchdog:
        """The watchdog of this process; a new one after a fork."""
        if cls._mine is None or cls._mine._worker != os.getpid():
            cls._mine = Watchdog()
        return cls._mine

    def begin(self, job: Job, claim: int) -> None:
        """Messages of this claim follow."""
        url = job.url.encode()
        assert _URL + len(url) <= _SIZE, "the URL of the database is too long"
        self._job = (claim, job.group_id, len(url))
        self.idle()
        self.allow(job.handler_timeout)
        self._shared[_URL : _URL + len(url)] = url

    def allow(self, handler_timeout: float | None) -> None:
        """The next calls may take this long."""
        limit = 0.0 if handler_timeout is None else handler_timeout + margin(handler_timeout)
        _JOB.pack_into(self._shared, _RUN.size, limit, *self._job)

    def runs(self, partition: int, offset: int, *, alone: bool = True) -> None:
        """The handler starts with this message, or with several of which it is the first."""
        _RUN.pack_into(self._shared, 0, time.monotonic(), offset, partition, alone)

    def idle(self) -> None:
        """No handler runs."""
        _RUN.pack_into(self._shared, 0, 0.0, 0, 0, False)


def _watch(worker: int, shared: mmap.mmap) -> None:
    """The child process: watches the worker until it ends or must be killed. Never returns."""
    try:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it ends when the worker ends
        signal.signal(signal.SIGALRM, _too_late)
        _let_go_of_files()
        noted: tuple[TaskClaim, _Seen] | None = None
        while os.getppid() == worker:
            limit, claim, group_id, length = _JOB.unpack_from(shared, _RUN.size)
            time.sleep(min(_PERIOD, limit / 10 if limit else _PERIOD))
            seen = _Seen(*_RUN.unpack_from(shared, 0))
            if noted is not None and noted[1] != seen:
                _note(*noted, None, stopped=False)
                noted = None
            if not seen.since:
                continue
            ran = time.monotonic() - seen.since
            stopped = bool(limit) and ran > limit
            if not stopped and (ran < (min(SLOW, limit / 4) if limit else SLOW) or noted is not None):
                continue
            time.sleep(0.01)
            if _Seen(*_RUN.unpack_from(shared, 0)) != seen:  # it made progress, or was read during a write
                continue
            url = bytes(shared[_URL : _URL + length]).decode()
            noted = (TaskClaim(url, group_id, claim), seen)
            _note(*noted, ran, stopped=stopped and seen.alone)  # among several, nothing shows which one hangs
            if stopped and os.getppid() == worker:
                os.kill(worker, signal.SIGKILL)
    finally:
        os._exit(0)


def _note(claim: TaskClaim, seen: _Seen, ran: float | None, *, stopped: bool) -> None:
    """Records it in the database, if that answers in time; else the message is found as one that ends its process."""
    signal.setitimer(signal.ITIMER_REAL, _NOTING)
    try:
        with suppress(CustodyError, TimeoutError):
            claim.note_overdue(seen.partition, seen.offset, ran, stopped=stopped)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _let_go_of_files() -> None:
    """Closes inherited files: readers of the worker's pipes must see its end, and not wait for this process too."""
    os.closerange(0, os.sysconf("SC_OPEN_MAX"))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def _too_late(_signal: int, _frame: FrameType | None) -> Any:
    raise TimeoutError("the database did not answer in time")
