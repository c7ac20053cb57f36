"""Where a new group starts."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from custody.errors import InvalidArgument
from custody.model.bounds import require
from custody.model.policy import require_zone

Start = Literal["earliest", "latest"] | int | datetime
"""At the first message, after the last one, at an offset, or at a time."""


def require_start(start: Start) -> None:
    """Refuses a value that is no start."""
    if isinstance(start, datetime):
        require_zone(start)
    elif isinstance(start, int) and not isinstance(start, bool):
        require("start", start)
    elif start not in ("earliest", "latest"):
        raise InvalidArgument(f"start cannot be {start!r}", "Start at earliest, latest, an offset or a time.")


def start_columns(start: Start) -> tuple[str, int | None, datetime | None]:
    """The kind of start, its offset, and its time, as arguments of `create_group`."""
    require_start(start)
    if isinstance(start, datetime):
        return "time", None, start
    return (start, None, None) if isinstance(start, str) else ("offset", start, None)
