"""What every command needs: the database of its options, its output, and a confirmation before it destroys."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from custody.cli import render
from custody.model.plain import to_json

if TYPE_CHECKING:
    from custody import Custody


class NeedsConfirmation(typer.BadParameter):
    """Nobody is there to be asked."""

    remedy = "Add --yes to go ahead, or --dry-run (where there is one) to look first."

    def format_message(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class Session:
    """The global options of one command line. `database` comes before `home`; neither means what is configured."""

    database: str | None
    home: Path | None
    listen_url: str | None
    json: bool
    quiet: bool
    color: bool

    def connect(self, *, worker: str | None = None) -> Custody:
        """Opens Custody. What it does is journalled under the name of who runs this command."""
        import custody

        return custody.connect(self.database, home=self.home, worker=worker or operator(), listen_url=self.listen_url)

    @property
    def configured_url(self) -> str | None:
        """The URL that was given or configured; None for the embedded database."""
        from custody import config

        return self.database or (None if self.home is not None else config.load().database)

    def show(self, document: object, text: str) -> None:
        """A result: the document as JSON, or the text."""
        if self.json:
            self.emit(document)
        else:
            print(text)

    def say(self, text: str) -> None:
        """What was done, on stdout, for people who want to hear it."""
        if not self.json and not self.quiet:
            print(text, flush=True)  # into a pipe too: a server that says where it serves goes on for long

    def note(self, text: str) -> None:
        """Something beside the result, on stderr."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def emit(self, document: object) -> None:
        """One JSON document on a line of its own."""
        print(to_json(document), flush=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
        """A table for people; numbers stand to the right."""
        if rows:
            render.console(color=self.color).print(render.table(columns, rows))
        else:
            self.say(empty)

    def facts(self, facts: Mapping[str, object]) -> None:
        """A few named values, one on each line."""
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {render.cell(value)}")

    def confirm(self, question: str, *, yes: bool) -> None:
        """Asks before something is destroyed; refuses where nobody can answer."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise NeedsConfirmation(f"{question} This needs a confirmation, and there is no terminal to ask on.")
        typer.confirm(question, abort=True, err=True)

    def progresses(self) -> bool:
        """Whether there is somebody to show progress to."""
        # on a terminal that cannot move its cursor nothing would be shown at all
        return not self.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def session_of(ctx: typer.Context) -> Session:
    return cast("Session", ctx.find_root().obj)


def operator() -> str:
    """Who runs this command, for the journal."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def counted(count: int, noun: str) -> str:
    """`1 message`, `1,000 messages`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def single(**given: Any) -> None:
    """Refuses two options that exclude one another."""
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(named) > 1:
        raise typer.BadParameter(f"{' and '.join(named)} exclude one another")
