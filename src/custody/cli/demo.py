"""`custody demo`: the stock example from nothing, and a verdict."""

from __future__ import annotations

import typer

from custody.cli.door import door_of


def demo(ctx: typer.Context) -> None:
    """Run the stock example from nothing: failures, poison, a worker killed with -9, and a verdict that was checked.

    It uses an embedded database of its own, which is removed afterwards.
    """
    from dataclasses import asdict

    from rich.console import Console

    from custody.demo import run

    door = door_of(ctx)
    console = Console(stderr=door.json, quiet=door.json and door.quiet, no_color=not door.color, soft_wrap=True)
    checks = run(console)
    good = all(check.good for check in checks)
    if door.json:
        door.emit({"good": good, "checks": [asdict(check) for check in checks]})
    if not good:
        raise typer.Exit(1)
