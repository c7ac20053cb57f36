"""Retention of a topic: by time, by size, or without limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

from msgspec import Meta

from custody.errors import InvalidArgument
from custody.model.limits import LARGEST
from custody.model.policy import Duration, seconds
from custody.model.setting import READERS, Settings, settings_of

Size = str | int
"""`"512MB"`, `"10GB"`, or a number of bytes."""

_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB)?\s*\Z", re.IGNORECASE)


def size_in_bytes(size: Size) -> int:
    """The size in bytes. A kilobyte is 1,024 bytes, as in PostgreSQL."""
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
    """A retention time in seconds; None for no limit."""
    if time is None:
        return None
    if seconds(time) < 0.001:
        raise InvalidArgument(f"{name} cannot be {time!r}", "It is at least a millisecond; leave it out for no limit.")
    return seconds(time)


@dataclass(frozen=True, kw_only=True)
class Retention(Settings):
    """What a topic keeps: messages up to `time` old, and at most `size`. Whole segments are dropped, oldest first.

    A segment is closed at the age `segment_time` or the size `segment_size`; the default is a tenth of what is kept.
    Messages that a group has not resolved are not dropped, unless `drop_unresolved`. Dead letters are always copied
    first.
    """

    time: Annotated[
        Duration | None,
        Meta(ge=0.001, description="Keep messages for this long, such as 7d.", extra={"column": "retention_time"}),
    ] = None
    size: Annotated[
        Size | None, Meta(description="Keep at most this much, such as 10GB.", extra={"column": "retention_bytes"})
    ] = None
    segment_time: Annotated[
        Duration | None, Meta(ge=0.001, description="Close a segment after this time (default: a tenth).")
    ] = None
    segment_size: Annotated[
        Size | None,
        Meta(description="Close a segment at this size (default: a tenth).", extra={"column": "segment_bytes"}),
    ] = None
    drop_unresolved: Annotated[bool, Meta(description="Also drop messages that a group has not resolved.")] = False

    what = "a retention"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.time is None and self.size is None:
            raise InvalidArgument(
                "a retention needs a time or a size", "Give one, or no retention at all to keep everything."
            )

    def columns(self) -> dict[str, Any]:
        """The retention as arguments of `custody.set_retention`."""
        return {name.removeprefix("retention_"): value for name, value in super().columns().items()}

    def holds_in(self, kept: Retention | None) -> bool:
        """Whether a topic that keeps `kept` keeps this; fields that were left out have been filled in there."""
        found = {} if kept is None else kept.columns()
        return all(found.get(name) == value for name, value in self.columns().items() if value is not None)

    @classmethod
    def from_columns(cls, row: Mapping[str, Any]) -> Self | None:
        """The retention of a topic's row."""
        if row["retention_time"] is None and row["retention_bytes"] is None:
            return None
        return cls(**{setting.name: row[setting.column] for setting in settings_of(cls)})
