"""Completion of the names of topics and groups by a shell. It starts no server, and a slow database offers no names."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from custody import Custody

TIMEOUT = 1.0
"""Seconds after which the shell gets what is there: nothing."""


def topics(ctx: typer.Context, incomplete: str) -> list[str]:
    """The topics whose name begins like this."""
    return _found(ctx, incomplete, lambda c: (one.name for one in c.topics()))


def groups(ctx: typer.Context, incomplete: str) -> list[str]:
    """The groups of the topic that is written before; without one, of all topics."""
    topic = ctx.params.get("topic")
    return _found(ctx, incomplete, lambda c: {one.name for one in (c.groups(topic) if topic else c.all_groups())})


def _found(ctx: typer.Context, incomplete: str, look: Callable[[Custody], Iterable[str]]) -> list[str]:
    given = ctx.find_root().params
    names: list[str] = []
    logging.disable()  # whatever is written would be in the middle of the user's command line

    def ask() -> None:
        try:
            names.extend(_names(given, look))
        except Exception:  # a shell has no place for an error; the command itself shows it
            names.clear()

    # a daemon: the process ends although a database is silent
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(TIMEOUT)
    return sorted(name for name in list(names) if name.startswith(incomplete))


def _names(given: dict[str, Any], look: Callable[[Custody], Iterable[str]]) -> list[str]:
    from custody.connection import connect_running

    c = connect_running(given.get("database"), home=given.get("home"))
    if c is None:
        return []
    with c:
        return list(look(c))
