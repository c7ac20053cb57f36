"""`custody work`: runs a user's app, or one handler over a group, until it is stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from custody.app import App
from custody.cli import completion, render
from custody.cli.app_file import target
from custody.cli.arguments import DURATION, VisibilityTimeout
from custody.cli.exporting import export_spans
from custody.cli.logs import Format, Level, LogFormat, LogLevel, logged
from custody.cli.monitor import LOOPBACK, STALLED, HealthPort, MetricsHost, MetricsPort, Ports, StalledAfter
from custody.cli.session import Session, counted, session_of
from custody.engine import Custody
from custody.worker import Worker
from custody.worker.signals import stopped_by_signals

CONCURRENCY = 8


def work(
    ctx: typer.Context,
    found: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MODULE[:NAME]",
            help="An app: app.py, module or module:app. Or a function, with --topic and --group: module:handler.",
        ),
    ],
    topic: Annotated[
        str | None, typer.Option("--topic", "-t", help="The topic of a function.", autocompletion=completion.topics)
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", "-g", help="The group of a function.", autocompletion=completion.groups)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="HANDLER", help="Of an app, only this: topic/group or a schedule. May be repeated."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "-c", min=1, help="How many calls of a function run at once (8).")
    ] = None,
    max_messages: Annotated[int | None, typer.Option(min=1, help="Most messages of one lease of a function.")] = None,
    visibility_timeout: VisibilityTimeout = None,
    poll: Annotated[Any, typer.Option(help="Longest time between two claims of a function.", **DURATION)] = "1s",
    grace: Annotated[Any, typer.Option(help="How long a stop waits for running handlers.", **DURATION)] = "30s",
    name: Annotated[str | None, typer.Option(help="Name of the worker in the journal (default: host:pid).")] = None,
    log_level: LogLevel = Level.WARNING,
    log_format: LogFormat = Format.TEXT,
    metrics_port: MetricsPort = None,
    health_port: HealthPort = None,
    metrics_host: MetricsHost = LOOPBACK,
    stalled_after: StalledAfter = STALLED,
) -> None:
    """Run all handlers and schedules of an app, or one function over the messages of a group.

    SIGTERM or Ctrl-C stops it after the running handlers.
    """
    from custody.config import this_process

    session = session_of(ctx)
    ports = Ports(metrics_port, health_port, metrics_host, stalled_after)
    run = target(found)
    if isinstance(run, App):
        given = {"--topic": topic, "--group": group, "--concurrency": concurrency, "--max-messages": max_messages,
                 "--visibility-timeout": visibility_timeout}  # fmt: skip
        if wrong := [option for option, value in given.items() if value is not None]:
            raise typer.BadParameter(f"{found} is an app: its code says what {' and '.join(wrong)} would")
    elif topic is None or group is None:
        raise typer.BadParameter(f"{found} is a function: give the --topic and the --group that it handles")
    elif only:
        raise typer.BadParameter(f"{found} is a function: --only is for apps")
    with session.connect(worker=name or this_process()) as c, logged(session, log_level, log_format):
        if isinstance(run, App):
            _run_app(session, run, c, ports, grace=grace, only=only or ())
        else:
            assert topic is not None
            assert group is not None
            worker = c.worker_for(
                topic,
                group,
                run,
                concurrency=concurrency or CONCURRENCY,
                max_messages=max_messages,
                visibility_timeout=visibility_timeout,
                poll=poll,
                grace=grace,
            )
            _run_worker(session, c, ports, f"{topic}/{group}", worker)


def _run_worker(session: Session, c: Custody, ports: Ports, name: str, worker: Worker) -> None:
    with _running(session, c, ports, name, {name: worker}, worker.stop):
        summary = worker.run()
    if session.json:
        topic, _, group = name.partition("/")
        session.emit({"topic": topic, "group": group, "summary": summary})
    session.say(f"stopped: {summary.in_words()}")


def _run_app(session: Session, app: App, c: Custody, ports: Ports, *, grace: str, only: Collection[str]) -> None:
    running = app.start(c, grace=grace, only=only)
    for line in running.changes:
        session.note(line)
    handlers = f"{running.name} ({', '.join(running.workers)})"
    with _running(session, c, ports, handlers, running.workers, running.stop):
        summaries = running.run()
    if session.json:
        parts = [(name.split("/"), summary) for name, summary in summaries.items()]
        session.emit(
            {
                "app": running.name,
                "handlers": [{"topic": topic, "group": group, "summary": one} for (topic, group), one in parts],
            }
        )
    for name, summary in summaries.items():
        session.say(f"stopped {name}: {summary.in_words()}")


@contextmanager
def _running(
    session: Session, c: Custody, ports: Ports, name: str, workers: Mapping[str, Worker], stop: Callable[[], None]
) -> Iterator[None]:
    def families() -> Any:
        from custody.monitoring.exposition import of_workers

        return of_workers(workers)

    def stopping() -> bool:
        return any(worker.stopping for worker in workers.values())

    vitals = {place: worker.vitals for place, worker in workers.items()}
    with (
        ports.opened(session, vitals, families, ping=c.ping, stopping=stopping),
        stopped_by_signals(stop),
        _status(session, name, workers.values()),
    ):
        export_spans()
        yield


@contextmanager
def _status(session: Session, name: str, workers: Collection[Worker]) -> Iterator[None]:
    """A status line on a terminal; elsewhere one line at the start."""
    if not session.progresses():
        if not session.json:
            session.note(f"working on {name}; SIGTERM or Ctrl-C stops")
        yield
        return
    from rich.status import Status

    started, ended = time.monotonic(), threading.Event()

    def line() -> str:
        counts = [worker.summary for worker in workers]
        done, failed = sum(one.done for one in counts), sum(one.failed + one.dead for one in counts)
        rate = done / max(0.001, time.monotonic() - started)
        reasons = sorted({worker.waiting_for for worker in workers if worker.waiting_for} - {"empty", "busy"})
        waits = f" · waits: {'; '.join(reasons)}" if reasons else ""
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
