"""`custody demo`: runs the stock example on a fresh database and checks the result."""

from __future__ import annotations

import typer

from custody.cli.session import session_of


def demo(ctx: typer.Context) -> None:
    """Run the stock example with failures, poison messages and a driver killed with -9, and check the result.

    It uses its own embedded database and removes it afterwards.
    """
    from dataclasses import asdict

    from rich.console import Console

    from custody.demo import run

    session = session_of(ctx)
    console = Console(
        stderr=session.json, quiet=session.json and session.quiet, no_color=not session.color, soft_wrap=True
    )
    checks = run(console)
    good = all(check.good for check in checks)
    if session.json:
        session.emit({"good": good, "checks": [asdict(check) for check in checks]})
    if not good:
        raise typer.Exit(1)
