"""`custody pipeline`: runs the pipelines of a file on Spark, tries them, or packs them for spark-submit."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from custody.cli import key_states, pipeline_states, render
from custody.cli.arguments import DURATION
from custody.cli.logs import Format, Level, LogFormat, LogLevel, logged
from custody.cli.monitor import LOOPBACK, STALLED, HealthPort, MetricsHost, MetricsPort, Ports, StalledAfter
from custody.cli.session import Session, counted, session_of
from custody.model.outcomes import OUTCOMES
from custody.model.plain import plain
from custody.vitals import Vitals

if TYPE_CHECKING:
    from custody.spark.figures import Batch, Outlook, PipelineSummary
    from custody.spark.pipeline import Pipeline
    from custody.spark.trial import Output, Trial

app = typer.Typer(no_args_is_help=True, help="Pipelines on Spark: run, try, pack, list, status, state.")
app.command("list")(pipeline_states.list_)
app.command()(pipeline_states.status)
app.add_typer(key_states.app, name="state")

File = Annotated[
    Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A Python file that defines pipelines.")
]
Only = Annotated[str | None, typer.Option(metavar="TOPIC/GROUP", help="Only this pipeline of the file.")]
Master = Annotated[str | None, typer.Option(help="Spark master (default: local[*,4], in this process).")]

COUNTED = (("ack", "done"), ("nack", "failed"), ("later", "later"), ("skip", "skipped"), ("release", "released"))
"""What the metrics call the counts of a commit; dead messages are among the failed ones."""
_SHOWN = 80  # characters of a payload in a table


@app.command()
def run(
    ctx: typer.Context,
    file: File,
    only: Only = None,
    master: Master = None,
    available_now: Annotated[bool, typer.Option("--available-now", help="One pass over the messages due now.")] = False,
    drain: Annotated[
        Any,
        typer.Option(help="One pass over the messages there now, which waits this long for retries.", **DURATION),
    ] = None,
    max_per_batch: Annotated[
        int | None, typer.Option(min=1, help="Most messages of one batch (default: 100,000).")
    ] = None,
    batch_time: Annotated[
        Any,
        typer.Option(help="Target duration of a batch (default: 10s); slow messages make batches smaller.", **DURATION),
    ] = None,
    grace: Annotated[
        Any,
        typer.Option(
            help="How long a stop waits for the running batch (default: 20s) before it cancels it.",
            **DURATION,
        ),
    ] = None,
    pause: Annotated[
        bool,
        typer.Option(
            "--pause/--no-pause",
            help="If all messages fail alike from the start, pause the group and count no failure.",
        ),
    ] = True,
    log_level: LogLevel = Level.WARNING,
    log_format: LogFormat = Format.TEXT,
    metrics_port: MetricsPort = None,
    health_port: HealthPort = None,
    metrics_host: MetricsHost = LOOPBACK,
    stalled_after: StalledAfter = STALLED,
) -> None:
    """Run the pipelines of a file concurrently. SIGTERM or Ctrl-C stops them after the running batches.

    A second signal ends them at once.
    """
    from custody.cli.pipeline_file import pipelines_of
    from custody.cli.pipeline_progress import Progress
    from custody.config import this_process

    session = session_of(ctx)
    pipelines = pipelines_of(file, only, shared=master is None or master.startswith("local"))
    from custody.spark import running
    from custody.spark.settings import BATCH_TIME, GRACE, MAX_PER_BATCH, RunSettings

    with session.connect(worker=this_process()) as c:
        stop = threading.Event()
        progress = Progress(session, c, pipelines, stop)
        vitals = {one.name: Vitals("driving") for one in pipelines}
        ports = Ports(metrics_port, health_port, metrics_host, stalled_after)

        def families() -> Any:
            from custody.monitoring.exposition import of_pipelines

            return of_pipelines({one.name: (one.source, one.group, vitals[one.name]) for one in pipelines})

        def on_batch(batch: Batch) -> None:
            progress.batch(batch)
            committed, shown = batch.committed, vitals[batch.pipeline]
            shown.claimed(committed.messages)
            shown.took.add(batch.took)
            shown.outcomes.update({kind: getattr(committed, name) for kind, name in COUNTED})
            shown.outcomes["died"] += committed.dead

        with (
            ports.opened(session, vitals, families, ping=c.ping, stopping=stop.is_set),
            logged(session, log_level, log_format),
            progress.shown(),
        ):
            settings = RunSettings(
                available_now=available_now,
                drain=drain,
                max_per_batch=max_per_batch or MAX_PER_BATCH,
                batch_time=BATCH_TIME if batch_time is None else batch_time,
                grace=GRACE if grace is None else grace,
                pause_if_all_fail=pause,
                on_batch=on_batch,
                stop=stop,
                vitals=vitals,
            )
            summaries, errors = running.run_all(pipelines, c, settings, master=master)
    if session.json:
        session.emit({"pipelines": summaries})
    for summary in summaries:
        session.say(summary_line(summary))
    for error in errors[1:]:
        session.note(f"error: {error}")
    if errors:
        raise errors[0]


@app.command("try")
def try_out(
    ctx: typer.Context,
    file: File,
    only: Only = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of messages for each pipeline.")] = 20,
    master: Master = None,
) -> None:
    """Show what a pipeline would do with the next messages of its group. Nothing is claimed, settled or published."""
    from custody.cli.pipeline_file import pipelines_of

    session = session_of(ctx)
    pipelines = pipelines_of(file, only, shared=master is None or master.startswith("local"))
    from custody.spark.running import started

    # a single pipeline starts Spark only if it has messages; several share one session
    several = len(pipelines) > 1
    with session.connect() as c, started(pipelines, c, None, master) if several else nullcontext() as spark:
        tried = [(one, one.try_out(c, limit=limit, spark=spark, master=master)) for one in pipelines]
    if session.json:
        session.emit([_document(pipeline, trial) for pipeline, trials in tried for trial in trials])
        return
    for pipeline, trials in tried:
        _show(session, pipeline, trials)


@app.command()
def pack(
    ctx: typer.Context,
    file: File,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="ARCHIVE", help="Path of the archive (default: the name of FILE with .zip, in this directory)."
        ),
    ] = None,
    with_dependencies: Annotated[
        bool,
        typer.Option(
            "--with-dependencies", help="Also write an archive of the packages that Custody needs in executors."
        ),
    ] = False,
) -> None:
    """Write an archive for spark-submit --py-files: Custody, the file, and the modules beside it that it imports.

    --with-dependencies writes a second archive, for --archives, if the Python of the executors lacks Custody's
    packages. Archives are reproducible. Only an archive that this command wrote is overwritten.
    """
    from custody.cli.pipeline_file import pipelines_of

    session = session_of(ctx)
    pipelines_of(file, shared=False)  # refuses a file that could not be run
    from custody.spark.environment import packing

    target = output or Path(f"{file.stem}.zip")
    if target.suffix != ".zip":
        raise typer.BadParameter(
            f"{target.name} must end in .zip, or Spark does not recognize it", param_hint="--output"
        )
    archive = packing.pack(file, target)
    made = packing.pack_dependencies(target.with_name(f"{target.stem}-deps.zip")) if with_dependencies else None
    command = ["spark-submit", "--master", "spark://HOST:7077", "--py-files", str(archive.archive)]
    if made is not None:
        command += ["--archives", f"{made.archive}#deps", "--conf", "spark.executorEnv.PYTHONPATH=deps"]
    command.append(str(file))
    if session.json:
        named = {"archive": archive, **({} if made is None else {"dependencies": made})}
        documents = {name: {**plain(one), "archive": str(one.archive)} for name, one in named.items()}
        session.emit({**documents, "command": command})
        return
    for one in [archive, *([] if made is None else [made])]:
        session.note(
            f"{one.archive}: {counted(one.files, 'file')}, {one.bytes / 1e6:,.1f} MB ({', '.join(one.contents)})"
        )
    session.say(shlex.join(command))


def summary_line(summary: PipelineSummary) -> str:
    """A summary as text: what was done, and what is left."""
    rate = summary.messages / max(0.001, summary.seconds)
    restarts = f", {counted(summary.restarts, 'restart')}" if summary.restarts else ""
    unmet = ", ".join(f"{name} {count:,}" for name, count in summary.unmet.items())
    return (
        f"{summary.pipeline}: {counted(summary.messages, 'message')} in {_batches(summary.batches)}, "
        f"{render.span(summary.seconds)} ({rate:,.0f}/s){restarts}\n"
        f"  {summary.in_words(dead='of them dead')}; {counted(summary.outputs, 'message')} published\n"
        f"{f'  expectations not met: {unmet}{chr(10)}' if unmet else ''}"
        f"  {_left(summary.left)}"
    )


def _batches(count: int) -> str:
    return f"{count:,} batch" + ("" if count == 1 else "es")


def _left(left: Outlook) -> str:
    parts = [f"{left.lag:,} {'not matched yet' if left.bound else 'not delivered yet'}"] if left.lag else []
    if left.waiting:
        due = "" if left.next_due is None else f" (the next in {render.span(max(0.0, left.next_due))})"
        parts.append(f"{left.waiting:,} to retry{due}")
    if left.parked:
        parts.append(f"{left.parked:,} behind {counted(left.blocked_keys, 'blocked key')}")
    waits = f"left: {', '.join(parts)}" if parts else "nothing left"
    return f"{waits}; {left.dead:,} dead in the group" if left.dead else waits


def _document(pipeline: Pipeline, trial: Trial) -> dict[str, Any]:
    outcome = {"outcome": OUTCOMES[trial.outcome].counted, "error": trial.error}
    message = plain(trial.message)
    return {"pipeline": pipeline.name, **message, **outcome, "outputs": [_output(one) for one in trial.outputs]}


def _output(output: Output) -> dict[str, Any]:
    document = plain(output)
    if isinstance(output.payload, bytes):
        import base64

        document["payload_base64"] = base64.b64encode(document.pop("payload")).decode()
    return document  # type: ignore[no-any-return]  # a dataclass is always an object


def _show(session: Session, pipeline: Pipeline, trials: Sequence[Trial]) -> None:
    rows: list[list[object]] = []
    for trial in trials:
        message = trial.message
        rows.append(
            [
                f"{message.topic}/{message.partition}/{message.offset}",
                message.key,
                _short(message.payload),
                OUTCOMES[trial.outcome].counted,
                trial.error,
                "; ".join(f"{output.topic}: {_short(output.payload)}" for output in trial.outputs) or None,
            ]
        )
    columns = ["message", "key", "payload", "would be", "error", "would publish"]
    session.table(columns, rows, empty=f"There are no new messages for {pipeline.name}.")
    if rows:
        session.note(f"{pipeline.name}: {counted(len(rows), 'message')} tried; nothing was settled or published")


def _short(payload: object) -> str:
    text = render.payload(payload)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
