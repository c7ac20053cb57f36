"""Remedies in the terms of the command line: an error names a verb, and its reader has a command."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import typer

ALSO = {
    "update_group": "groups update",
    "ensure_topic": "topics create --ensure",
    "ensure_group": "groups create --ensure",
    "ensure_schedule": "schedules create --ensure",
    "publish_delayed": "publish --delay",
    "publish_many": "publish",
}
"""Verbs that the command of another one calls, or one that is written by hand."""


def in_commands(remedy: str) -> str:
    """The remedy with the command in place of each verb: `create_topic` or `c.create_topic(…)`."""

    def command(found: re.Match[str]) -> str:
        path = _commands().get(found["verb"])
        called = found["call"] is not None or "_" in found["verb"]
        return f"`custody {path}`" if path is not None and called else found[0]

    return re.sub(r"`?\b(?:c\.|custody\.)?(?P<verb>[a-z]+(?:_[a-z]+)*)\b(?P<call>\([^)]*\))?`?", command, remedy)


@cache
def _commands() -> dict[str, str]:
    from custody.cli.app import registered

    return {**dict(_verbs(registered(), "")), **ALSO}


def _verbs(app: typer.Typer, path: str) -> list[tuple[str, str]]:
    """The verbs of commands that are made of them, each with the words of the command."""
    found = [
        (one.callback, f"{path}{one.name or getattr(one.callback, '__name__', '')}") for one in app.registered_commands
    ]
    verbs = [(_verb(command).__name__, words) for command, words in found if _verb(command) is not None]
    for group in app.registered_groups:
        if group.typer_instance is not None:
            verbs += _verbs(group.typer_instance, f"{path}{group.name} ")
    return verbs


def _verb(command: Any) -> Any:
    """The method of Custody that a command calls. Methods of its parts have names that mean nothing alone."""
    verb = getattr(command, "__verb__", None)
    return verb if verb is not None and "_" in verb.__name__ else None
