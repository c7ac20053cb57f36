"""`custody demo`: runs the stock example on a fresh database and checks the result."""

from __future__ import annotations

from typing import Annotated

import typer

from custody import extras
from custody.cli.session import session_of


def demo(
    ctx: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="With plain workers, without Spark: about ten seconds.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="With --quick: show the dashboard of its data afterwards, until Ctrl-C.")
    ] = False,
) -> None:
    """Run the stock example with failures, poison messages and a process killed with -9, and check the result.

    It uses its own embedded database and removes it afterwards. Ctrl-C and SIGTERM remove it too.
    """
    from dataclasses import asdict

    from rich.console import Console

    session = session_of(ctx)
    if serve and not quick:
        raise typer.BadParameter("--serve needs --quick", param_hint="--serve")
    console = Console(
        stderr=session.json, quiet=session.json and session.quiet, no_color=not session.color, soft_wrap=True
    )
    if serve:
        extras.require("http")  # before the demo, and not at its end
    if quick:
        from custody.demo.quick import run as run_quick

        checks = run_quick(console, serve=serve)
    else:
        from custody.demo.show import run as run_on_spark  # imports Spark

        checks = run_on_spark(console)
    good = all(check.good for check in checks)
    if session.json:
        session.emit({"good": good, "checks": [asdict(check) for check in checks]})
    if not good:
        raise typer.Exit(1)
