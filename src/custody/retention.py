"""How much of a topic is kept: by time, by size, or for ever."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from custody.errors import InvalidArgument
from custody.policy import Duration, seconds

Size = str | int
"""`"512MB"`, `"10GB"`, or a number of bytes."""

_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB)?\s*\Z", re.IGNORECASE)
_LARGEST = 2**62


def size_in_bytes(size: Size) -> int:
    """The size in bytes; a kilobyte has 1,024 of them, as PostgreSQL counts."""
    value = -1
    given: object = size
    if isinstance(given, str):
        match = _SIZE.match(given)
        if match is not None:
            value = int(min(float(match[1]) * _UNITS[(match[2] or "B").upper()], 2.0 * _LARGEST))
    elif isinstance(given, int) and not isinstance(given, bool):
        value = given
    if not 0 < value <= _LARGEST:
        raise InvalidArgument(f"{size!r} is not a size", 'Write bytes, or a number with a unit: "512MB", "10GB".')
    return value


def keep_time(name: str, time: Duration | None) -> float | None:
    """A time to keep something, in seconds; None if there is none."""
    if time is None:
        return None
    if seconds(time) < 0.001:
        raise InvalidArgument(f"{name} cannot be {time!r}", "It is at least a millisecond; leave it out for no limit.")
    return seconds(time)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What a topic keeps: the last `time`, and no more than `size`. Whole segments go, oldest first.

    A segment ends when it is `segment_time` old or `segment_size` large: a tenth of what is kept, if not given.
    Nothing that a group has not resolved goes, unless `drop_unresolved`; dead letters are kept aside in any case.
    """

    time: Duration | None = None
    size: Size | None = None
    segment_time: Duration | None = None
    segment_size: Size | None = None
    drop_unresolved: bool = False

    def __post_init__(self) -> None:
        if self.time is None and self.size is None:
            raise InvalidArgument("a retention needs a time or a size", "Without a retention everything is kept.")
        self.columns()

    def columns(self) -> dict[str, Any]:
        """The retention as arguments of `custody.set_retention`."""
        times = {"time": keep_time("time", self.time), "segment_time": keep_time("segment_time", self.segment_time)}
        return {
            **{name: None if value is None else f"{value} s" for name, value in times.items()},
            "bytes": None if self.size is None else size_in_bytes(self.size),
            "segment_bytes": None if self.segment_size is None else size_in_bytes(self.segment_size),
            "drop_unresolved": self.drop_unresolved,
        }

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Self | None:
        """The retention of a topic's row."""
        if row["retention_time"] is None and row["retention_bytes"] is None:
            return None
        return cls(
            time=row["retention_time"],
            size=row["retention_bytes"],
            segment_time=row["segment_time"],
            segment_size=row["segment_bytes"],
            drop_unresolved=row["drop_unresolved"],
        )
