"""`manage.py custody …`: the command line of Custody, on the database of the setting `CUSTODY`, with Django set up."""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from custody import cli, extras
from custody.django.client import close
from custody.django.configuration import configuration
from custody.errors import CustodyError

OF_DJANGO = ("--settings", "--pythonpath")
"""Options of every command of manage.py, which has read them already."""


class Command(BaseCommand):
    help = "Run the command line of Custody on the database of the setting CUSTODY: manage.py custody --help"
    requires_system_checks: Sequence[str] = []  # they look at the schema, which this command makes

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("arguments", nargs=REMAINDER, help="Command and options of Custody.")

    def run_from_argv(self, argv: list[str]) -> None:
        """Hands everything over, also options such as --help."""
        try:
            code = self._run(without_options_of_django(argv[2:]))
        except CommandError as error:
            self.stderr.write(f"error: {error}")
            code = error.returncode
        sys.exit(code)

    def handle(self, *_arguments: Any, **options: Any) -> None:
        """For `call_command("custody", "stats", "orders")`."""
        given = options.get("stdout")
        with redirect_stdout(given) if given is not None else nullcontext():
            code = self._run(options["arguments"])
        if code:
            raise CommandError(f"custody {' '.join(options['arguments'])} ended with {code}", returncode=code)

    def _run(self, arguments: Sequence[str]) -> int:
        try:
            found = configuration()
            extras.require("cli")
        except CustodyError as error:
            raise CommandError(str(error)) from error
        close()  # a migration would wait for nothing of ours, and the command opens its own
        # in the environment of this process alone: what is on a command line can be seen by others
        with _environment(
            CUSTODY_DATABASE=found.url,
            CUSTODY_LISTEN_URL=found.listen_url,
            CUSTODY_API_KEY=found.api_key,
            CUSTODY_CA=None if found.ca is None else str(found.ca),
            CUSTODY_ALLOW_INSECURE="1" if found.allow_insecure else None,
        ):
            return cli.run(arguments)


def without_options_of_django(arguments: Sequence[str]) -> list[str]:
    """The arguments for Custody."""
    left: list[str] = []
    pending = list(arguments)
    while pending:
        argument = pending.pop(0)
        if argument == "--":
            return [*left, argument, *pending]
        if argument in OF_DJANGO:
            pending = pending[1:]
        elif not argument.startswith(tuple(f"{name}=" for name in OF_DJANGO)):
            left.append(argument)
    return left


@contextmanager
def _environment(**given: str | None) -> Iterator[None]:
    """Variables for the command. Those of the settings come before those that were there."""
    before = {name: os.environ.get(name) for name in given}
    try:
        os.environ.update({name: value for name, value in given.items() if value is not None})
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
