"""Runs statements by ADBC and reads their results into Arrow. No read waits for ever for a silent server.

The driver has no time limit, does not expose its socket, and its cancel needs a server that answers. So each read runs
it in a thread of its own, and the reader waits for the thread. If the server is silent, the reader gives up and leaves
the thread behind: only the thread uses the connection, and it closes it when it wakes up.

The thread fetches a batch only when it is asked to. So it holds no batch in memory that nobody wants yet, and it is
idle when a reader forks.

Opening a connection costs twenty times as much as with psycopg, so a process keeps one for each database.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeAlias

import adbc_driver_manager as adbc
import psycopg
import pyarrow as pa
from psycopg.conninfo import make_conninfo

from custody.errors import CustodyError, DatabaseUnavailable, OffsetOutOfRange
from custody.store.connecting import Backend, BoundedConnection, Waiting
from custody.store.postgres import translate

if TYPE_CHECKING:
    from adbc_driver_postgresql import dbapi

OPENING = 120.0
"""Seconds for the driver to open a connection to a server that answers others. The driver reads all types, and behind a
pooler it may have to wait for a backend."""
BATCH = {"adbc.postgresql.batch_size_hint_bytes": str(2 << 20)}
"""Small batches, so that some arrive over a slow line too: a server counts as idle when it has sent its answer."""


class _Kept(NamedTuple):
    """A connection in autocommit mode. Behind a pooler each read is a transaction: the driver prepares a statement
    before it runs it."""

    connection: dbapi.Connection
    backend: Backend


class _Ended(Exception):
    """There is nothing more to read, or the reader has stopped."""


_Answer: TypeAlias = "pa.RecordBatch | BaseException | Backend | None"
"""A batch; an exception, which ends the read; or the backend that the thread waits for next, None if its waits have
limits."""

_idle: dict[str, _Kept] = {}


def fetch(url: str, statements: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The results of these statements, one after the other.

    Uses the process's connection to that database after a check. Opens a new one if that is broken, after a fork, or if
    another read of the process uses it. After any error, and after an unfinished read, the connection is closed.
    """
    process = os.getpid()
    wanted: SimpleQueue[bool] = SimpleQueue()
    answers: SimpleQueue[_Answer] = SimpleQueue()
    # a daemon, because a thread that was left behind must not keep the process alive
    threading.Thread(target=_drive, args=(url, statements, wanted, answers), name="custody-arrow", daemon=True).start()
    backend: Backend | None = None
    try:
        while not isinstance(answer := _wait(answers, backend), _Ended):
            if answer is None or isinstance(answer, Backend):
                backend = answer
            elif isinstance(answer, BaseException):
                _fail(answer)
            else:
                yield answer
                if os.getpid() != process:
                    raise CustodyError("a read cannot continue in a forked process", "Begin a new one there.")
                wanted.put(True)
    finally:
        wanted.put(False)


def _wait(answers: SimpleQueue[_Answer], backend: Backend | None) -> _Answer:
    """The next answer of the thread."""
    waiting = Waiting()
    while True:
        try:
            return answers.get(timeout=None if backend is None else max(0.0, waiting.look - time.monotonic()))
        except Empty:
            assert backend is not None, "without a limit the queue waits"
            too_long = backend.pid is None and waiting.so_far > OPENING
            if too_long or not waiting.goes_on(backend):
                raise translate(waiting.silent()) from None


def _drive(url: str, statements: Sequence[str], wanted: SimpleQueue[bool], answers: SimpleQueue[_Answer]) -> None:
    """The body of the thread. Only this thread uses the connection."""
    try:
        with _connected(url, answers.put) as connection:
            for statement in statements:
                with connection.cursor(adbc_stmt_kwargs=BATCH) as cursor:
                    cursor.execute(statement)
                    for batch in cursor.fetch_record_batch():
                        answers.put(batch)
                        del batch
                        if not wanted.get():
                            raise _Ended
    except BaseException as error:
        answers.put(error)
    else:
        answers.put(_Ended())


@contextmanager
def _connected(url: str, tell: Callable[[Backend | None], None]) -> Iterator[dbapi.Connection]:
    kept = _borrow(url, tell)
    try:
        if kept.backend.pooled:
            kept.connection.adbc_connection.set_autocommit(False)
        yield kept.connection
        if kept.backend.pooled:
            kept.connection.adbc_connection.set_autocommit(True)  # commits
    except BaseException:
        _close(kept)
        raise
    if _idle.setdefault(url, kept) is not kept:  # another read has returned its own
        _close(kept)


def _borrow(url: str, tell: Callable[[Backend | None], None]) -> _Kept:
    kept = _idle.pop(url, None)
    if kept is not None:
        tell(kept.backend)
        if _lives(kept):
            return kept
        _close(kept)
        tell(None)
    return _open(url, tell)


def _open(url: str, tell: Callable[[Backend | None], None]) -> _Kept:
    # imported late, as it loads pandas: Spark starts many processes that only plan, and never read
    from adbc_driver_postgresql import dbapi

    with BoundedConnection.connect(url, application_name="custody-probe") as first:
        backend = first.backend
    tell(backend._replace(pid=None))
    connection = dbapi.connect(make_conninfo(backend.url, application_name="custody-arrow"), autocommit=True)
    try:
        if not backend.pooled:
            backend = backend._replace(pid=_pid(connection))
    except BaseException:
        connection.close()
        raise
    tell(backend)
    return _Kept(connection, backend)


def _pid(connection: dbapi.Connection) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchall()[0][0])


def _lives(kept: _Kept) -> bool:
    try:
        if kept.backend.pooled:
            kept.connection.adbc_connection.set_autocommit(False)
            kept.connection.adbc_connection.set_autocommit(True)
            return True
        return _pid(kept.connection) == kept.backend.pid
    except (adbc.Error, OSError):
        return False


def _close(kept: _Kept) -> None:
    with suppress(Exception):  # it may be broken
        kept.connection.close()


@atexit.register
def close_all() -> None:
    """Closes the idle connections of this process."""
    while _idle:
        _close(_idle.popitem()[1])


def _forget() -> None:
    """Runs in a forked process. The connections belong to the parent, and freeing their objects would end its sessions,
    so they are never freed."""
    for kept in _idle.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


def _fail(error: BaseException) -> NoReturn:
    """Raises the exception of the thread; an error of the database as one of ours."""
    if isinstance(error, psycopg.Error):
        raise translate(error) from error
    if isinstance(error, adbc.Error | pa.ArrowException | OSError):
        raise _translate(error) from error
    raise error


def _translate(error: Exception) -> CustodyError:
    # while rows are fetched, every error is an OSError that has only a text
    text = str(error).partition("\n\nQuery was:")[0].strip()
    state = getattr(error, "sqlstate", None) or ""
    if state == "42P01" and "custody.log_" in text:
        return OffsetOutOfRange(
            "a segment of the log was dropped while it was read", "Run the query again from its start."
        )
    if state == "42501" or "permission denied for" in text:
        return translate(psycopg.errors.InsufficientPrivilege(text))
    unreachable = getattr(error, "status_code", None) == adbc.AdbcStatusCode.IO or isinstance(error, OSError)
    if state.startswith(("08", "57P")) or (unreachable and not state and "ERROR:" not in text):
        return DatabaseUnavailable(f"the database cannot be reached: {text}", "Check that it runs, and try again.")
    return CustodyError(f"the database reported: {text}")
