"""What every command needs: a connection, output, and a confirmation before something is destroyed."""

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
    """A confirmation is needed, and there is no terminal to ask on."""

    remedy = "Add --yes to go ahead, or --dry-run, where the command has it, to look first."

    def format_message(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class Session:
    """The global options. `database` takes precedence over `home`; without either the configuration decides."""

    database: str | None
    home: Path | None
    listen_url: str | None
    json: bool
    quiet: bool
    color: bool

    def connect(self, *, worker: str | None = None) -> Custody:
        """Opens Custody. The journal names the user of this command as the actor."""
        import custody

        return custody.connect(self.database, home=self.home, worker=worker or operator(), listen_url=self.listen_url)

    @property
    def configured_url(self) -> str | None:
        """The given or configured URL; None for the embedded database."""
        from custody import config

        return self.database or (None if self.home is not None else config.load().database)

    def show(self, document: object, text: str) -> None:
        """Prints a result: the document as JSON, or the text."""
        if self.json:
            self.emit(document)
        else:
            print(text)

    def say(self, text: str) -> None:
        """Prints what was done, unless output is JSON or quiet."""
        if not self.json and not self.quiet:
            print(text, flush=True)  # also into a pipe: `serve` prints its address and then runs for long

    def note(self, text: str) -> None:
        """Prints something that is not the result, to stderr."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def emit(self, document: object) -> None:
        """Prints a JSON document on one line."""
        print(to_json(document), flush=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, empty: str) -> None:
        """Prints a table, with numbers aligned to the right."""
        if rows:
            render.console(color=self.color).print(render.table(columns, rows))
        else:
            self.say(empty)

    def facts(self, facts: Mapping[str, object]) -> None:
        """Prints named values, one on each line."""
        width = max(map(len, facts))
        for name, value in facts.items():
            print(f"{name:<{width}}  {render.cell(value)}")

    def confirm(self, question: str, *, yes: bool) -> None:
        """Asks for a confirmation; without a terminal to ask on, it refuses."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise NeedsConfirmation(f"{question} This needs a confirmation, and there is no terminal to ask on.")
        typer.confirm(question, abort=True, err=True)

    def progresses(self) -> bool:
        """Whether to show progress: stderr is a terminal, and --quiet was not given."""
        # a dumb terminal, which cannot move its cursor, would show nothing at all
        return not self.quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def session_of(ctx: typer.Context) -> Session:
    return cast("Session", ctx.find_root().obj)


def operator() -> str:
    """The user of this command, for the journal."""
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
    """Refuses more than one of these options."""
    named = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(named) > 1:
        raise typer.BadParameter(f"{' and '.join(named)} cannot be combined")
