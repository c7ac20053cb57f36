"""The end of a traceback, as it is kept with a failed message."""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

LONGEST_TRACEBACK = 2_000
"""Characters of a traceback that are kept; `custody.kept_traceback` has the same number."""
_CUSTODY = f"{Path(__file__).parents[1]}/"


def last_lines(error: BaseException) -> str | None:
    """The last whole lines of the traceback of an error, from the handler's first own frame on; None without one."""
    if error.__traceback__ is None:
        return None
    try:
        lines = traceback.format_exception(type(error), error, _own(error.__traceback__))
    except Exception:  # the error has a __str__ that raises, or a traceback that cannot be read
        return None
    return shortened("".join(lines).rstrip())


def stack_of(thread: threading.Thread) -> str | None:
    """The last lines of what a thread is doing now; None if it has ended."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return None
    found = traceback.extract_stack(frame)
    own = next((n for n, one in enumerate(found) if not _internal(one.filename)), 0)
    return shortened("Stack of the handler:\n" + "".join(traceback.format_list(found[own:])).rstrip())


def shortened(text: str) -> str:
    """The last whole lines of a text that are not longer than what is kept; of a longer line, its end."""
    if len(text) <= LONGEST_TRACEBACK:
        return text
    mark = "…\n"
    end = text[len(mark) - LONGEST_TRACEBACK :]
    return mark + (end.partition("\n")[2] or end)


def _own(trace: TracebackType) -> TracebackType:
    """Without the frames by which Custody has called the handler; all, if there are no others."""
    own: TracebackType | None = trace
    while own is not None and _internal(own.tb_frame.f_code.co_filename):
        own = own.tb_next
    return own or trace


def _internal(filename: str) -> bool:
    return filename.startswith(_CUSTODY) or filename == threading.__file__
