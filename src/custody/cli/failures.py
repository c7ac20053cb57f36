"""Failures of a command: an exit code, and one error on stderr, as text or JSON."""

from __future__ import annotations

import json
import os
import sys

import typer

from custody.errors import CustodyError

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def _report(code: str, message: str, remedy: str, *, as_json: bool) -> None:
    if as_json:
        error = {"code": code, "message": message, "remedy": remedy}
        print(json.dumps({"error": error}, ensure_ascii=False), file=sys.stderr)
        return
    print(f"error: {message}", file=sys.stderr)
    if remedy:
        print(f"  {remedy}", file=sys.stderr)


def refused(error: CustodyError, *, as_json: bool) -> int:
    """An error of Custody, with its code and remedy."""
    from custody.cli.remedies import in_commands

    _report(error.code, error.message, in_commands(error.remedy), as_json=as_json)
    return FAILED


def usage(error: typer.TyperException, *, as_json: bool) -> int:
    """An invalid command line, or one that needs a confirmation."""
    message = error.format_message()
    if message:  # there is none if the help was shown, as for `custody topics` alone
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "custody"
        remedy = getattr(error, "remedy", f"`{path} --help` shows arguments and options.")
        _report("usage", message, remedy, as_json=as_json)
    return error.exit_code


def declined(*, as_json: bool) -> int:
    """The confirmation was declined."""
    _report("declined", "not confirmed; nothing was changed", "", as_json=as_json)
    return FAILED


def interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return INTERRUPTED


def unread() -> int:
    """The reader of our output has closed the pipe, so nothing more is printed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def unexpected(error: Exception, *, as_json: bool) -> int:
    """An error that is not Custody's own: a missing package, an unreadable file, or a bug."""
    name = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
    _report("unexpected", f"{name}{error}", "CUSTODY_TRACEBACK=1 shows where it happened.", as_json=as_json)
    return FAILED
