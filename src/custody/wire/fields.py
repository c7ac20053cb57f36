"""The kinds of fields that requests have. What does not fit is refused while the body is read, with its path."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Self

from msgspec import Meta

from custody.errors import InvalidArgument
from custody.model import policy
from custody.model.bounds import SMALL
from custody.model.entities import NAME
from custody.model.retention import size_in_bytes

Text = Annotated[str, Meta(pattern=r"^[^\u0000]*$")]
"""PostgreSQL stores every character but NUL."""
Name = Annotated[str, Meta(min_length=1, max_length=200, pattern=r"^[^\u0000]*$")]
"""A name that is looked for: one that cannot exist is not found, like any other."""
NewName = Annotated[str, Meta(pattern=NAME)]
LARGEST = 2**62
"""No offset that a request takes is larger: what is added to one stays in the range of a bigint."""
MOST = 10_000
"""So many messages an answer has at most."""
LISTED = 100_000
"""So many are listed by one answer at most."""


class Help(str):
    """What a parameter of a verb is for. It is a type of its own, so that no other annotation is taken for it."""


class Range(Enum):
    """Numbers of which a verb takes more than a request. The client makes one fit, or answers as the verb would."""

    PARTITION = "partition"
    OFFSET = "offset"
    PAGE = "page"


Small = Annotated[int, Meta(ge=0, le=SMALL)]
Partition = Annotated[int, Meta(ge=0, le=SMALL), Range.PARTITION]
Offset = Annotated[int, Meta(ge=0, le=LARGEST), Range.OFFSET]
Page = Annotated[int, Meta(ge=1, le=LISTED), Range.PAGE, Help("The most that are listed.")]
Batch = Annotated[int, Meta(ge=1, le=MOST), Range.PAGE, Help("The most messages of one answer.")]
Positive = Annotated[int, Meta(ge=1, le=SMALL)]
Large = Annotated[int, Meta(ge=1, le=2**62)]
When = Annotated[datetime, Meta(tz=True)]
Reason = Text | None


class Duration(float):
    """Seconds; written as `"30s"`, `"100ms"`, or a number of seconds."""

    @classmethod
    def of(cls, given: policy.Duration | None) -> Self | None:
        """For a request; whether it is long enough is the server's to say."""
        return None if given is None else cls(policy.seconds(given))


class Timeout(Duration):
    """A duration of at least a millisecond."""


GivenTimeout = Annotated[policy.Duration, Timeout]
"""A parameter of a verb that a request has as a `Timeout`."""


class Size(int):
    """Bytes; written as `"512MB"`, or a number of them."""


def read(kind: type, value: Any) -> Any:
    """Makes a field of one of the kinds above, for msgspec, which adds the path to what is refused."""
    try:
        if issubclass(kind, Duration):
            made = kind(policy.seconds(value))
            if kind is Timeout and made < 0.001:
                raise ValueError("it is at least a millisecond")
            return made
        if kind is Size:
            return Size(size_in_bytes(value))
    except InvalidArgument as error:
        raise ValueError(str(error)) from error
    raise NotImplementedError(f"fields cannot be of the kind {kind}")


def write(value: Any) -> Any:
    """Makes JSON of a field of one of the kinds above, for msgspec."""
    if isinstance(value, Duration):
        return float(value)
    if isinstance(value, Size):
        return int(value)
    raise NotImplementedError(f"fields cannot be of the kind {type(value)}")


def schema(kind: type) -> dict[str, Any]:
    """How one of the kinds above is described."""
    if issubclass(kind, Duration):
        least = {"minimum": 0.001} if kind is Timeout else {"minimum": 0}
        return {
            "description": kind.__doc__,
            "anyOf": [
                {"type": "string", "pattern": r"^[0-9]{1,5}(\.[0-9]{1,3})?(ms|s|m|h|d)?$", "examples": ["30s"]},
                {"type": "number", **least, "maximum": 3_153_600_000},
            ],
        }
    if kind is Size:
        return {
            "description": kind.__doc__,
            "anyOf": [
                {"type": "string", "pattern": r"^[0-9]{1,5}(\.[0-9]{1,3})?(B|KB|MB|GB|TB)?$", "examples": ["512MB"]},
                {"type": "integer", "minimum": 1, "maximum": 2**62},
            ],
        }
    raise NotImplementedError(f"there is no description of {kind}")
