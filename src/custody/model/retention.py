"""How much of a topic is kept: by time, by size, or for ever."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from msgspec import Meta

from custody.errors import InvalidArgument
from custody.model.policy import Duration, seconds
from custody.model.setting import READERS, Settings, settings_of

Size = str | int
"""`"512MB"`, `"10GB"`, or a number of bytes."""

_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB)?\s*\Z", re.IGNORECASE)
LARGEST = 2**62


def size_in_bytes(size: Size) -> int:
    """The size in bytes; a kilobyte has 1,024 of them, as PostgreSQL counts."""
    value = -1
    given: object = size
    if isinstance(given, str):
        match = _SIZE.match(given)
        if match is not None:
            value = int(min(float(match[1]) * _UNITS[(match[2] or "B").upper()], 2.0 * LARGEST))
    elif isinstance(given, int) and not isinstance(given, bool):
        value = given
    if not 0 < value <= LARGEST:
        raise InvalidArgument(f"{size!r} is not a size", 'Write bytes, or a number with a unit: "512MB", "10GB".')
    return value


READERS[Size] = size_in_bytes


def keep_time(name: str, time: Duration | None) -> float | None:
    """A time to keep something, in seconds; None if there is none."""
    if time is None:
        return None
    if seconds(time) < 0.001:
        raise InvalidArgument(f"{name} cannot be {time!r}", "It is at least a millisecond; leave it out for no limit.")
    return seconds(time)


@dataclass(frozen=True, kw_only=True)
class Retention(Settings):
    """What a topic keeps: the last `time`, and no more than `size`. Whole segments go, oldest first.

    A segment ends when it is `segment_time` old or `segment_size` large: a tenth of what is kept, if not given.
    Nothing that a group has not resolved goes, unless `drop_unresolved`; dead letters are kept aside in any case.
    """

    time: Annotated[
        Duration | None,
        Meta(ge=0.001, description="Keep messages that long: 7d.", extra={"column": "retention_time"}),
    ] = None
    size: Annotated[
        Size | None, Meta(description="Keep no more than that: 10GB.", extra={"column": "retention_bytes"})
    ] = None
    segment_time: Annotated[
        Duration | None, Meta(ge=0.001, description="End a segment after that time (default: a tenth).")
    ] = None
    segment_size: Annotated[
        Size | None,
        Meta(description="End a segment at that size (default: a tenth).", extra={"column": "segment_bytes"}),
    ] = None
    drop_unresolved: Annotated[bool, Meta(description="Let retention pass what groups have not resolved.")] = False

    what = "a retention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time is None and self.size is None:
            raise InvalidArgument("a retention needs a time or a size", "Without a retention everything is kept.")

    def columns(self) -> dict[str, Any]:
        """The retention as arguments of `custody.set_retention`."""
        return {name.removeprefix("retention_"): value for name, value in super().columns().items()}

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Self | None:
        """The retention of a topic's row."""
        if row["retention_time"] is None and row["retention_bytes"] is None:
            return None
        return cls(**{setting.name: row[setting.column] for setting in settings_of(cls)})
