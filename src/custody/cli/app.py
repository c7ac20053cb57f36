"""The command tree and the options that every command takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from custody.cli import (
    apikeys,
    blocked,
    consume,
    dead,
    delayed,
    demo,
    doctor,
    groups,
    inspect,
    operate,
    outbox,
    pipeline,
    publish,
    relay,
    serve,
    topics,
    transactions,
    upkeep,
    work,
)
from custody.cli.session import Session, session_of

FLAGS = ("--json", "--quiet", "-q", "--no-color", "--allow-insecure")
VALUED = ("--database", "--home", "--listen-url")


def hoist(arguments: Sequence[str]) -> list[str]:
    """Moves the global options to the front, so that they may stand anywhere before a `--`."""
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
    return front + rest


def options(
    ctx: typer.Context,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL", envvar="CUSTODY_DATABASE", help="A postgresql:// or http:// URL; else the embedded database."
        ),
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Where the embedded database is kept (default: CUSTODY_HOME, or ./.custody).")
    ] = None,
    listen_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The same database without its connection pooler: LISTEN there wakes consumers at once."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON for programs instead of tables.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Results and errors only.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Plain text. NO_COLOR does the same.")] = False,
    allow_insecure: Annotated[
        bool, typer.Option("--allow-insecure", help="Send an API key over http:// beyond this machine.")
    ] = False,
) -> None:
    """A durable message log in which every message has a lifecycle.

    The global options may stand anywhere on the command line.
    """
    if allow_insecure:
        os.environ["CUSTODY_ALLOW_INSECURE"] = "1"  # as settings are read, wherever a server is connected to
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
    from importlib.metadata import version as version_of

    found = {"custody": version_of("custody"), "python": platform.python_version()}
    session_of(ctx).show(found, f"custody {found['custody']} (Python {found['python']})")


def command() -> Callable[..., Any]:
    """The whole command tree, ready to be called."""
    app = typer.Typer(
        name="custody",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(options)
    app.add_typer(topics.app, name="topics")
    app.add_typer(groups.app, name="groups")
    app.command()(publish.publish)
    app.command()(consume.consume)
    app.command()(work.work)
    app.command()(serve.serve)
    app.add_typer(apikeys.app, name="apikeys")
    app.add_typer(pipeline.app, name="pipeline")
    app.add_typer(outbox.app, name="outbox")
    app.add_typer(relay.app, name="relay")
    app.command("dead")(dead.dead)
    app.command()(dead.redrive)
    app.command()(dead.discard)
    app.command()(dead.replay)
    app.command()(operate.rewind)
    app.command()(operate.pause)
    app.command()(operate.resume)
    app.add_typer(blocked.app, name="blocked")
    app.add_typer(delayed.app, name="delayed")
    app.add_typer(transactions.app, name="transactions")
    app.command()(inspect.trace)
    app.command()(inspect.stats)
    app.command()(upkeep.maintain)
    app.command()(upkeep.journal)
    app.command()(demo.demo)
    app.command()(doctor.migrate)
    app.command()(doctor.doctor)
    app.command()(version)
    return typer.main.get_command(app)
