"""`--watch`: shows figures again and again until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from custody.cli import render
from custody.cli.arguments import DURATION
from custody.cli.session import Session
from custody.model.policy import seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

Watch = Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")]
Every = Annotated[Any, typer.Option(help="Interval of --watch.", **DURATION)]
SHORTEST = 0.05


def watch(
    session: Session,
    look: Callable[[], T],
    shown: Callable[[T], RenderableType],
    every: str,
    document: Callable[[T], Any],
) -> None:
    """Repeats: as JSON one document on each line; on a terminal in one place, elsewhere one below the other."""
    console = render.console(color=session.color)
    pause = max(SHORTEST, seconds(every))
    if session.json or not console.is_terminal:
        while True:
            found = look()
            if session.json:
                session.emit(document(found))
            else:
                console.print(shown(found))
            time.sleep(pause)
    from rich.live import Live

    with Live(shown(look()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(pause)
            live.update(shown(look()), refresh=True)
