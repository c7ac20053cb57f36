"""The log of commands that run until they are stopped: on stderr, as text or JSON, from a level on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from custody.cli import render
from custody.cli.session import Session


class Level(StrEnum):
    """How serious a line has to be."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Format(StrEnum):
    """How a line is written."""

    TEXT = "text"
    JSON = "json"


LogLevel = Annotated[Level, typer.Option("--log-level", help="Log what is at least this serious.")]
LogFormat = Annotated[Format, typer.Option("--log-format", help="Write lines of text, or a JSON object for each.")]


@contextmanager
def logged(session: Session, level: Level, kind: Format) -> Iterator[None]:
    """Logs to stderr what Custody reports: failures of handlers, refused outcomes, an unreachable database."""
    handler: logging.Handler = logging.StreamHandler()
    if kind is Format.JSON:
        handler.setFormatter(JsonLines())
    elif session.progresses():
        from rich.logging import RichHandler

        handler = RichHandler(console=render.console(color=session.color, stderr=True), show_path=False, markup=False)
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.getLogger("custody")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class JsonLines(logging.Formatter):
    """A JSON object on each line, with the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)
