"""`custody work`: runs a user's handler over a group until it is stopped."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from custody.cli import render
from custody.cli.arguments import DURATION, VisibilityTimeout
from custody.cli.exporting import export_spans
from custody.cli.logs import Format, Level, LogFormat, LogLevel, logged
from custody.cli.session import Session, counted, session_of
from custody.handlers import require_finished
from custody.model.entities import Message
from custody.model.outcomes import OUTCOMES, outcome_of

if TYPE_CHECKING:
    from custody.worker import Worker


def work(
    ctx: typer.Context,
    handler: Annotated[
        str, typer.Argument(metavar="MODULE:HANDLER", help="A function; the module is looked up from this directory.")
    ],
    topic: Annotated[str, typer.Option("--topic", "-t", help="The topic.")],
    group: Annotated[str, typer.Option("--group", "-g", help="The group.")],
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, help="Number of handlers that run at once.")
    ] = 8,
    max_messages: Annotated[int | None, typer.Option(min=1, help="Most messages of one lease.")] = None,
    visibility_timeout: VisibilityTimeout = None,
    poll: Annotated[Any, typer.Option(help="Longest time between two claims.", **DURATION)] = "1s",
    grace: Annotated[Any, typer.Option(help="How long a stop waits for running handlers.", **DURATION)] = "30s",
    name: Annotated[str | None, typer.Option(help="Name of the worker in the journal (default: host:pid).")] = None,
    log_level: LogLevel = Level.WARNING,
    log_format: LogFormat = Format.TEXT,
) -> None:
    """Run a handler over the messages of a group. SIGTERM or Ctrl-C stops it after the running handlers."""
    from custody.config import this_process
    from custody.worker.signals import stopped_by_signals

    session = session_of(ctx)
    tally = Tally(load(handler))
    with session.connect(worker=name or this_process()) as c:
        worker = c.worker_for(
            topic,
            group,
            tally.handler,
            concurrency=concurrency,
            max_messages=max_messages,
            visibility_timeout=visibility_timeout,
            poll=poll,
            grace=grace,
        )
        with (
            logged(session, log_level, log_format),
            stopped_by_signals(worker.stop),
            _status(session, f"{topic}/{group}", worker, tally),
        ):
            export_spans()
            summary = worker.run()
    if session.json:
        session.emit({"topic": topic, "group": group, "summary": summary})
    session.say(f"stopped: {summary.in_words()}")


def load(name: str) -> Callable[[Message], object]:
    """Imports `module:function`, from the current directory first."""
    found = imported(name)
    if not callable(found):
        raise typer.BadParameter(f"{name} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]  # whatever the module has under that name


def imported(name: str) -> Any:
    """The object `module:name`; the current directory is searched first."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise typer.BadParameter(f"{name!r} is not MODULE:HANDLER, such as handlers:handle")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module was found, but not something that it imports
        raise typer.BadParameter(f"there is no module {module_name!r} in {Path.cwd()} or installed") from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise typer.BadParameter(f"module {module_name} has no {path!r}")
        found = getattr(found, part)
    return found


class Tally:
    """Counts the outcomes of a handler for the status line. The final result is the worker's own summary."""

    def __init__(self, handler: Callable[[Message], Any]) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        if inspect.iscoroutinefunction(handler):

            @functools.wraps(handler)
            async def counted(message: Message) -> None:
                with self._counting():
                    require_finished(await handler(message))
        else:

            @functools.wraps(handler)
            def counted(message: Message) -> None:
                with self._counting():
                    require_finished(handler(message))

        self.handler: Callable[[Message], object] = counted

    @contextmanager
    def _counting(self) -> Iterator[None]:
        error: BaseException | None = None
        try:
            yield
        except Exception as raised:
            error = raised
            raise
        finally:
            with self._lock:
                self.counts[OUTCOMES[outcome_of(error).kind].counted] += 1


@contextmanager
def _status(session: Session, name: str, worker: Worker, tally: Tally) -> Iterator[None]:
    """A status line on a terminal; elsewhere one line at the start."""
    if not session.progresses():
        if not session.json:
            session.note(f"working on {name}; SIGTERM or Ctrl-C stops")
        yield
        return
    from rich.status import Status

    started, ended = time.monotonic(), threading.Event()

    def line() -> str:
        counts = tally.counts
        done, failed = counts["done"], counts["failed"] + counts["dead"]
        rate = done / max(0.001, time.monotonic() - started)
        waits = f" · waits: {worker.waiting_for}" if worker.waiting_for not in (None, "empty", "busy") else ""
        return f"{name} · {counted(done, 'message')} done · {failed:,} failed · {rate:,.0f}/s{waits}"

    def refresh() -> None:
        while not ended.wait(0.25):
            status.update(line())

    with Status(line(), console=render.console(color=session.color, stderr=True)) as status:
        refresher = threading.Thread(target=refresh, name="custody-status", daemon=True)
        refresher.start()
        try:
            yield
        finally:
            ended.set()
            refresher.join()
