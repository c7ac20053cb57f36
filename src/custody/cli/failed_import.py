"""The error of a user's file that cannot be imported: where it was raised, and what."""

from __future__ import annotations

import traceback

from custody.errors import CustodyError


def explained(file: str, name: str, error: BaseException) -> tuple[str, str]:
    """The message and the remedy: `app.py, line 4: KeyError: 'TOKEN'`. `name` is what the user calls the file."""
    if isinstance(error, SyntaxError) and error.filename == file:
        line, text = error.lineno, error.msg
    else:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line, text = lines[-1] if lines else None, getattr(error, "message", None) or str(error)
    where = name if line is None else f"{name}, line {line}"
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    remedy = error.remedy if isinstance(error, CustodyError) else "CUSTODY_TRACEBACK=1 shows the traceback."
    return f"{where}: {what}", remedy
