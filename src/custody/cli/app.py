"""The command tree and the global options."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer

from custody.cli import (
    apikeys,
    blocked,
    capture,
    consume,
    dead,
    delayed,
    demo,
    doctor,
    grants,
    groups,
    inspect,
    migrate,
    operate,
    outbox,
    pipeline,
    publish,
    relay,
    schedules,
    serve,
    status,
    topics,
    transactions,
    ui,
    upkeep,
    work,
)
from custody.cli.session import Session, session_of

FLAGS = ("--json", "--quiet", "-q", "--no-color", "--allow-insecure")
VALUED = ("--database", "--home", "--listen-url")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The global options, which users may write anywhere before a `--`, and the rest: the command and its arguments."""
    front: list[str] = []
    rest: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument == "--":
            rest += [argument, *pending]
            break
        if argument in FLAGS or argument.startswith(tuple(f"{name}=" for name in VALUED)):
            front.append(argument)
        elif argument in VALUED and pending:
            front += [argument, pending.pop(0)]
        else:
            rest.append(argument)
    return front, rest


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"custody {version_of('custody')}")
        raise typer.Exit


def options(
    ctx: typer.Context,
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="CUSTODY_DATABASE",
            help="A postgresql:// or http:// URL. Default: the embedded database.",
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(help="Directory of the embedded database (default: CUSTODY_HOME, or .custody here or above)."),
    ] = None,
    listen_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL of the same database without its connection pooler, for LISTEN."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Print without colors, as NO_COLOR does.")] = False,
    allow_insecure: Annotated[
        bool, typer.Option("--allow-insecure", help="Allow sending an API key over http:// to another machine.")
    ] = False,
) -> None:
    """A durable message log in which every message has a lifecycle.

    Global options may be anywhere on the command line.
    """
    if allow_insecure:
        os.environ["CUSTODY_ALLOW_INSECURE"] = "1"  # read wherever a client connects to a server
    ctx.obj = Session(
        database=database if home is None else None,
        home=home,
        listen_url=listen_url if home is None else None,
        json=json,
        quiet=quiet,
        color=not no_color,
    )


def version(ctx: typer.Context) -> None:
    """Show the version of Custody and of Python."""
    import platform

    found = {"custody": version_of("custody"), "python": platform.python_version()}
    session_of(ctx).show(found, f"custody {found['custody']} (Python {found['python']})")


@cache
def command(name: str = "") -> Callable[..., Any]:
    """The command or group of this name, ready to be called, or all of them: to build all takes a tenth of a second."""
    app = registered()
    commands = [one for one in app.registered_commands if one.name == name]
    nested = [one for one in app.registered_groups if one.name == name]
    if commands or nested:
        app.registered_commands, app.registered_groups = commands, nested
    return typer.main.get_command(app)


def registered() -> typer.Typer:
    app = typer.Typer(
        name="custody",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    app.add_typer(topics.app, name="topics")
    app.add_typer(groups.app, name="groups")
    app.command("publish")(publish.publish)
    app.command("consume")(consume.consume)
    app.command("work")(work.work)
    app.command("serve")(serve.serve)
    app.command("ui")(ui.ui)
    app.add_typer(schedules.app, name="schedules")
    app.add_typer(apikeys.app, name="apikeys")
    app.add_typer(pipeline.app, name="pipeline")
    app.add_typer(outbox.app, name="outbox")
    app.add_typer(relay.app, name="relay")
    app.command("dead")(dead.dead)
    app.command("redrive")(dead.redrive)
    app.command("discard")(dead.discard)
    app.command("replay")(dead.replay)
    app.command("rewind")(operate.rewind)
    app.command("retry")(operate.retry)
    app.command("pause")(operate.pause)
    app.command("resume")(operate.resume)
    app.add_typer(blocked.app, name="blocked")
    app.add_typer(delayed.app, name="delayed")
    app.add_typer(transactions.app, name="transactions")
    app.command("trace")(inspect.trace)
    app.command("capture")(capture.capture)
    app.command("stats")(inspect.stats)
    app.command("status")(status.status)
    app.command("workers")(status.workers)
    app.command("maintain")(upkeep.maintain)
    app.command("journal")(upkeep.journal)
    app.command("demo")(demo.demo)
    app.command("migrate")(migrate.migrate)
    app.command("grants")(grants.grants)
    app.command("doctor")(doctor.doctor)
    app.command("version")(version)
    return app
