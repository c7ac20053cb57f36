"""The log of a server: a line for each request and for each error, never the content of a message.

Payloads, keys of messages, API keys, headers and query values are never logged. Exceptions of libraries may quote them,
so only the type and the stack of an exception are logged, and messages of the database that cannot quote a value.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from custody.errors import Transient

Format = Literal["json", "text"]
MOST = 10_000
"""Most lines that wait to be written. If the reader of the log is too slow, lines are lost; requests do not wait."""
GATHERED = 0.05
"""Seconds that a line of a request may wait for others, so that they are written together. Warnings do not wait."""
_WITHOUT_VALUES = ("08", "25", "26", "28", "40", "42", "53", "54", "55", "57", "58", "XX")
"""SQLSTATE classes whose messages name tables, functions and resources, but never quote a value."""
_LOGGERS = ("custody", "uvicorn", "asyncio", "psycopg.pool")


@contextmanager
def written(kind: Format, level: str = "info", stream: TextIO | None = None) -> Iterator[None]:
    """Writes the server's log while the context is open. Lines for requests have the level `info`."""
    handler = Writer(stream or sys.stderr, JsonLines() if kind == "json" else TextLines())
    wanted: int = logging.getLevelNamesMapping()[level.upper()]
    before = [(logger := logging.getLogger(name), logger.level, logger.propagate) for name in _LOGGERS]
    for logger, _, _ in before:
        logger.addHandler(handler)
        logger.setLevel(wanted if logger.name == "custody" else max(logging.WARNING, wanted))
        logger.propagate = False
    try:
        yield
    finally:
        for logger, before_level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(before_level)
            logger.propagate = propagate
        handler.close()


class Writer(logging.Handler):
    """Passes lines to a thread that writes them, so that a blocked reader of the log does not block requests."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter, most: int = MOST) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._stream, self._most = stream, most
        self._waiting: deque[logging.LogRecord] = deque()
        self._lost = 0
        self._queued, self._urgent, self._ended = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._write, name="custody-log", daemon=True)
        self._thread.start()

    def handle(self, record: logging.LogRecord) -> bool:
        # without the handler's lock: a deque can be used by many threads
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= self._most:
            self._lost += 1
            return
        self._waiting.append(record)
        if not self._queued.is_set():
            self._queued.set()
        if record.levelno > logging.INFO:
            self._urgent.set()

    def _write(self) -> None:
        while True:
            self._queued.wait()
            self._urgent.wait(GATHERED)
            self._queued.clear()
            if not self._ended:
                self._urgent.clear()
            lines = []
            while self._waiting:
                lines.append(self.format(self._waiting.popleft()))
            if self._lost:
                lost, self._lost = self._lost, 0
                lines.append(self.format(_record(f"{lost} lines were lost: the log is read too slowly")))
            if lines and not self._put("".join(f"{line}\n" for line in lines)):
                return
            if self._ended and not self._waiting:
                return

    def _put(self, text: str) -> bool:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the stream is closed: the server goes on without a log
            self._most = 0
            return False
        return True

    def close(self) -> None:
        """Writes the waiting lines, for at most 5 s."""
        self._ended = True
        self._urgent.set()
        self._queued.set()
        self._thread.join(5)
        super().close()


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord("custody.http.logs", logging.WARNING, __file__, 0, text, None, None)


def request_line(logger: logging.Logger, said: dict[str, Any]) -> None:
    """Logs a request, as `logger.info("request", extra={"custody": said})` does for ten times the cost: that looks for
    the thread, the process and the line of the caller, which no line of ours has."""
    line = logging.LogRecord.__new__(logging.LogRecord)
    now = time.time()
    line.__dict__ = {**_REQUEST, "name": logger.name, "created": now, "msecs": now % 1 * 1000, "custody": said}
    logger.handle(line)


_REQUEST = vars(logging.LogRecord("", logging.INFO, __file__, 0, "request", None, None))


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a line; `request` lines have those of the request."""
    said = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": _message(record),
        **getattr(record, "custody", {}),
    }
    if record.exc_info and record.exc_info[1] is not None:
        said |= described(record.exc_info[1])
    return said


def _message(record: logging.LogRecord) -> str:
    if not isinstance(record.args, tuple) or not record.args:
        return record.getMessage()
    return str(record.msg) % tuple(_words(each) if isinstance(each, BaseException) else each for each in record.args)


def _words(error: BaseException) -> str:
    # the reason why a database is unreachable or busy quotes no row
    return f"{type(error).__name__} ({error})" if isinstance(error, Transient) else type(error).__name__


def described(error: BaseException) -> dict[str, Any]:
    """An exception without its message, which may quote a payload."""
    said: dict[str, Any] = {"error": _words(error), "at": _way(error)}
    if (state := getattr(error, "sqlstate", None)) is not None:
        said["sqlstate"] = state
        if state.startswith(_WITHOUT_VALUES):
            said["database"] = getattr(getattr(error, "diag", None), "message_primary", None)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        said["cause"] = described(cause)
    return said


def _way(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)
    return [f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in frames]


class JsonLines(logging.Formatter):
    _encode = json.JSONEncoder(separators=(",", ":")).encode  # in ASCII: see _plain

    def format(self, record: logging.LogRecord) -> str:
        return self._encode(fields(record))


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = fields(record)
        head = f"{said.pop('time')} {said.pop('level').upper()} {_plain(said.pop('message'))}"
        said.pop("logger")
        rest = " ".join(f"{name}={_shown(value)}" for name, value in said.items() if value is not None)
        return f"{head} {rest}".rstrip()


def _plain(text: str) -> str:
    """Escapes all but printable ASCII, so that no name can break a line or move the cursor."""
    return text if text.isascii() and text.isprintable() else json.dumps(text)[1:-1]


def _shown(value: object) -> str:
    """Quotes a value with spaces, quotes or `=`, so that it cannot imitate another field."""
    if type(value) is int or type(value) is float or (isinstance(value, str) and _PLAIN.match(value)):
        return str(value)
    return json.dumps(value)


_PLAIN = re.compile(r"[!#-<>-~]*\Z")
"""Printable ASCII without spaces, quotes and `=`."""
