"""The command line, `custody`: parses, calls the engine, renders. Exit codes: 0, 1 failed, 2 usage, 130 interrupted."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from custody import extras

__all__ = ["main", "run"]


def main() -> None:
    """The entry point of the command `custody`."""
    try:
        code: int | str = run(sys.argv[1:])
    except KeyboardInterrupt:  # while commands are imported; later ones are reported by `run`
        print("interrupted", file=sys.stderr)
        code = 130
    except ModuleNotFoundError as error:  # of typer, with which every other error is reported
        missing = extras.missing(error)
        if missing is None:
            raise
        code = f"error: {missing.message}\n  {missing.remedy}"
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code. Raises only if CUSTODY_TRACEBACK is set."""
    import typer

    from custody.cli import failures
    from custody.cli.app import command, split
    from custody.errors import CustodyError

    options, rest = split(arguments)
    as_json = "--json" in options
    if "--no-color" in options:
        os.environ["NO_COLOR"] = "1"  # before Rich reads it, also for the help
    try:
        answer = command(*rest[:1])(args=[*options, *rest], prog_name="custody", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        return failures.usage(error, as_json=as_json)
    except typer.Abort:
        return failures.declined(as_json=as_json)
    except CustodyError as error:
        if os.environ.get("CUSTODY_TRACEBACK"):
            raise
        return failures.refused(error, as_json=as_json)
    except KeyboardInterrupt:
        return failures.interrupted()
    except BrokenPipeError:
        return failures.unread()
    except Exception as error:
        if os.environ.get("CUSTODY_TRACEBACK"):
            raise
        missing = extras.missing(error)
        if missing is not None:
            return failures.refused(missing, as_json=as_json)
        return failures.unexpected(error, as_json=as_json)
    if answer == failures.INTERRUPTED:
        return failures.interrupted()
    return answer if isinstance(answer, int) else failures.OK
