"""Types of fields in requests, with bounds. An invalid value is refused with its path while the body is decoded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Self

from msgspec import Meta

from custody.errors import InvalidArgument
from custody.model import policy, retention
from custody.model.entities import NAME
from custody.model.limits import LARGEST, MOST, NAME_LENGTH, SMALL

Text = Annotated[str, Meta(pattern=r"^[^\u0000]*$")]
"""PostgreSQL stores every character but NUL."""
Name = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH, pattern=r"^[^\u0000]*$")]
"""A name to look up. It may be one that cannot exist, which is not found like any other."""
NewName = Annotated[str, Meta(pattern=NAME)]
LISTED = 100_000
"""Most entries of one list."""


class Help(str):
    """The description of a verb's parameter. It has its own type, so that no other annotation is mistaken for it.

    `metavar` is what the command line writes for a value, such as LIKE.
    """

    metavar: str | None

    def __new__(cls, text: str, metavar: str | None = None) -> Self:
        made = super().__new__(cls, text)
        made.metavar = metavar
        return made


PLACES = {
    "topic": "The name of the topic.",
    "group": "The name of the group.",
    "partition": "The number of the partition, starting at 0.",
    "offset": "The offset of the message in its partition.",
    "delay_id": "The id of the delayed message, from the answer to its publish.",
    "producer_id": "The id of the producer.",
    "transaction_id": "The id of the transaction.",
    "key": "The key.",
    "name": "The name of the schedule.",
    "schedule": "The name of the schedule.",
}
"""The descriptions of parameters that mean the same in each verb."""


@dataclass(frozen=True)
class Sent:
    """Marks a parameter of a verb that has another type in a request: `of` converts the verb's value, `value` converts
    it back. An error of `value` has its path within the field (`[2].payload`)."""

    kind: Any
    of: Callable[[Any], Any]
    value: Callable[[Any], Any] = lambda value: value


class Range(Enum):
    """Numbers that have a wider range in a verb than in a request. The client clamps them, or answers as the verb
    does."""

    PARTITION = "partition"
    OFFSET = "offset"
    PAGE = "page"


Small = Annotated[int, Meta(ge=0, le=SMALL)]
Partition = Annotated[int, Meta(ge=0, le=SMALL), Range.PARTITION]
Offset = Annotated[int, Meta(ge=0, le=LARGEST), Range.OFFSET]
Page = Annotated[int, Meta(ge=1, le=LISTED), Range.PAGE, Help("Most entries to list.")]
Batch = Annotated[int, Meta(ge=1, le=MOST), Range.PAGE, Help("Most messages to return.")]
Positive = Annotated[int, Meta(ge=1, le=SMALL)]
Large = Annotated[int, Meta(ge=1, le=LARGEST)]
Partitions = Annotated[int, Meta(ge=1, le=4096)]
When = Annotated[datetime, Meta(tz=True)]
DryRun = Annotated[bool, Help("Only show what would happen.")]
Reason = Annotated[Text | None, Help("The reason, recorded in the journal.")]


class Duration(float):
    """A duration such as `"30s"` or `"100ms"`, or a number of seconds."""

    @classmethod
    def of(cls, given: policy.Duration | None) -> Self | None:
        """Converts a duration for a request. The server checks its bounds."""
        return None if given is None else cls(policy.seconds(given))


class Timeout(Duration):
    """A duration of at least a millisecond."""


class Size(int):
    """A size such as `"512MB"`, or a number of bytes."""

    @classmethod
    def of(cls, given: retention.Size) -> Self:
        return cls(retention.size_in_bytes(given))


GivenTimeout = Annotated[policy.Duration, Sent(Timeout, Timeout.of)]
GivenSize = Annotated[retention.Size, Sent(Size, Size.of)]


def read(kind: type, value: Any) -> Any:
    """Decodes a field of one of the types above, as msgspec's `dec_hook`. msgspec adds the path to an error."""
    try:
        if issubclass(kind, Duration):
            made = kind(policy.seconds(value))
            if kind is Timeout and made < 0.001:
                raise ValueError("it must be at least a millisecond")
            return made
        if kind is Size:
            return Size.of(value)
    except InvalidArgument as error:
        raise ValueError(str(error)) from error
    raise NotImplementedError(f"fields cannot be of the kind {kind}")


def write(value: Any) -> Any:
    """Encodes a field of one of the types above, as msgspec's `enc_hook`."""
    if isinstance(value, Duration):
        return float(value)
    if isinstance(value, Size):
        return int(value)
    raise NotImplementedError(f"fields cannot be of the kind {type(value)}")


def schema(kind: type) -> dict[str, Any]:
    """The JSON schema of one of the types above."""
    if issubclass(kind, Duration):
        least = {"minimum": 0.001} if kind is Timeout else {"minimum": 0}
        return {
            "description": kind.__doc__,
            "anyOf": [
                {"type": "string", "pattern": r"^[0-9]{1,5}(\.[0-9]{1,3})?(ms|s|m|h|d)?$", "examples": ["30s"]},
                {"type": "number", **least, "maximum": int(policy.LONGEST)},
            ],
        }
    if kind is Size:
        return {
            "description": kind.__doc__,
            "anyOf": [
                {"type": "string", "pattern": r"^[0-9]{1,5}(\.[0-9]{1,3})?(B|KB|MB|GB|TB)?$", "examples": ["512MB"]},
                {"type": "integer", "minimum": 1, "maximum": LARGEST},
            ],
        }
    raise NotImplementedError(f"there is no description of {kind}")
