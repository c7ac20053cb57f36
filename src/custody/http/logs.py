"""What a server writes down: a line for each request and for what goes wrong, and never what a message contains.

Payloads, keys of messages, API keys, headers and query values are not in it. Errors of a library may quote any of them:
of an exception only its kind and the way to it are written, and the words of the database where they quote no value.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TextIO

from custody.errors import Transient

Format = Literal["json", "text", "none"]
FORMATS: tuple[Format, ...] = ("json", "text", "none")
MOST = 10_000
"""So many lines wait to be written. Whoever reads them slower than that loses some, and not the server its time."""
_WITHOUT_VALUES = ("08", "25", "26", "28", "40", "42", "53", "54", "55", "57", "58", "XX")
"""Classes of errors of the database whose messages name tables, functions and resources, and never quote a value."""
_LOGGERS = ("custody", "uvicorn", "asyncio", "psycopg.pool")


def format_for(stream: TextIO) -> Format:
    """Text for people at a terminal, JSON for everything else."""
    return "text" if stream.isatty() else "json"


@contextmanager
def written(kind: Format, stream: TextIO | None = None) -> Iterator[None]:
    """Writes what the server logs, meanwhile. `none`: no line for each request, and the rest as text."""
    handler = Writer(stream or sys.stderr, JsonLines() if kind == "json" else TextLines())
    before = [(logger := logging.getLogger(name), logger.level, logger.propagate) for name in _LOGGERS]
    for logger, _, _ in before:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO if logger.name == "custody" and kind != "none" else logging.WARNING)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
        handler.close()


class Writer(logging.Handler):
    """Hands lines to a thread, which writes them: a reader that stands still does not make requests wait."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter, most: int = MOST) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._stream, self._most = stream, most
        self._waiting: deque[logging.LogRecord] = deque()
        self._lost = 0
        self._news, self._ended = threading.Event(), False
        self._thread = threading.Thread(target=self._write, name="custody-log", daemon=True)
        self._thread.start()

    def handle(self, record: logging.LogRecord) -> bool:
        # no lock around it, as the handler's own would be: a deque takes from many threads
        self.emit(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._waiting) >= self._most:
            self._lost += 1
            return
        self._waiting.append(record)
        if not self._news.is_set():
            self._news.set()

    def _write(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            lines = []
            while self._waiting:
                lines.append(self.format(self._waiting.popleft()))
            if self._lost:
                lost, self._lost = self._lost, 0
                lines.append(self.format(_record(f"{lost} lines were not written: nobody read them in time")))
            if lines and not self._put("".join(f"{line}\n" for line in lines)):
                return
            if self._ended and not self._waiting:
                return

    def _put(self, text: str) -> bool:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nobody will ever read: a server goes on without its log
            self._most = 0
            return False
        return True

    def close(self) -> None:
        """Writes what is left, if it can be written soon."""
        self._ended = True
        self._news.set()
        self._thread.join(5)
        super().close()


def _record(text: str) -> logging.LogRecord:
    return logging.LogRecord("custody.http.logs", logging.WARNING, __file__, 0, text, None, None)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What a line says: `request` lines have the fields of the request."""
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
    # a database that cannot be reached or is busy tells why, and quotes no row for it
    return f"{type(error).__name__} ({error})" if isinstance(error, Transient) else type(error).__name__


def described(error: BaseException) -> dict[str, Any]:
    """An exception without its words, which may quote a message."""
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
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(fields(record), separators=(",", ":"))  # in ASCII: see _plain


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = fields(record)
        head = f"{said.pop('time')} {said.pop('level').upper()} {_plain(said.pop('message'))}"
        said.pop("logger")
        rest = " ".join(f"{name}={_shown(value)}" for name, value in said.items() if value is not None)
        return f"{head} {rest}".rstrip()


def _plain(text: str) -> str:
    """A text that is one line and moves no cursor, whatever names are in it: all but printable ASCII is escaped."""
    return text if text.isascii() and text.isprintable() else json.dumps(text)[1:-1]


def _shown(value: object) -> str:
    """A value that ends where it seems to end: no field can be made up in another."""
    plain = isinstance(value, str) and value.isascii() and value.isprintable() and not set(' "=') & set(value)
    return str(value) if plain else json.dumps(value)
