"""Parses the options of the source `format("custody")`, and refuses unknown ones. Runs on the driver."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal

from custody.errors import InvalidArgument, PartitionNotFound, did_you_mean
from custody.model.bounds import require
from custody.model.policy import require_zone
from custody.spark.format.columns import TABLES

EARLIEST, LATEST = -2, -1  # as in Kafka's source

Position = Literal["earliest", "latest"] | datetime | Mapping[int, int]
"""A position in every partition. A partition missing in a mapping is read from its start or to its end."""

_OF_ALL = ["url", "topic", "table"]
_OF_EVENTS = [
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxRowsPerTrigger",
    "maxOffsetsPerTrigger",
    "failOnDataLoss",
]
_OF_VIEWS = ["group"]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What to read. `url` is None if none was given; it may contain a password, so `repr` omits it."""

    url: str | None = field(repr=False)
    topic: str | None
    table: str
    group: str | None
    starting: Position
    ending: Position
    max_rows: int | None
    fail_on_data_loss: bool

    @classmethod
    def parse(cls, given: Mapping[str, str], *, streaming: bool = False) -> ReadOptions:
        """Reads Spark's options, whose names are case-insensitive."""
        values = {name.lower(): value for name, value in given.items()}
        _refuse_unknown(values)
        table = values.get("table", "events").lower()
        if table not in TABLES:
            raise InvalidArgument(f"there is no table {table!r}", did_you_mean(table, list(TABLES)))
        events = table == "events"
        for name in _OF_VIEWS if events else _OF_EVENTS:
            if name.lower() in values:
                raise InvalidArgument(f"the option {name} cannot be used with the table {table}", "Leave it out.")
        if events and not values.get("topic"):
            raise InvalidArgument("the option topic is missing", "Give the topic: .option('topic', 'orders').")
        if streaming:
            if not events:
                raise InvalidArgument(f"the table {table} cannot be streamed", "Read it with spark.read.")
            for name in ("endingOffsets", "endingTimestamp"):
                if name.lower() in values:
                    raise InvalidArgument(f"a stream does not support {name}", "Leave it out, or use spark.read.")
        return cls(
            url=values.get("url"),
            topic=values.get("topic"),
            table=table,
            group=values.get("group"),
            starting=_position(values, "starting", "earliest"),
            ending=_position(values, "ending", "latest"),
            max_rows=_max_rows(values),
            fail_on_data_loss=boolean("failOnDataLoss", values.get("failondataloss", "true")),
        )


def _refuse_unknown(values: Mapping[str, str]) -> None:
    known = [*_OF_ALL, *_OF_EVENTS, *_OF_VIEWS]
    for name in values:
        if name not in map(str.lower, known):
            raise InvalidArgument(f"{name!r} is not an option of the source custody", did_you_mean(name, known))


def _position(values: Mapping[str, str], which: str, default: Literal["earliest", "latest"]) -> Position:
    offsets, timestamp = values.get(f"{which}offsets"), values.get(f"{which}timestamp")
    if offsets is not None and timestamp is not None:
        raise InvalidArgument(f"{which}Offsets and {which}Timestamp cannot be combined", "Give one of them.")
    if timestamp is not None:
        return _time(f"{which}Timestamp", timestamp)
    return default if offsets is None else _offsets(f"{which}Offsets", offsets)


def _offsets(name: str, text: str) -> Position:
    word = text.strip().lower()
    if word == "earliest":
        return "earliest"
    if word == "latest":
        return "latest"
    try:
        offsets = {int(partition): offset for partition, offset in json.loads(text).items()}
        for partition, offset in offsets.items():
            require("partition", partition)
            require(name, offset)
    except (AttributeError, ValueError, InvalidArgument, PartitionNotFound):
        offsets = None
    if offsets is None or not all(offset >= EARLIEST for offset in offsets.values()):
        raise InvalidArgument(
            f"{name} cannot be {text!r}",
            'Give "earliest", "latest", or an offset for each partition as JSON: {"0": 5, "1": -2}; '
            "-2 is the earliest, -1 the latest.",
        )
    return offsets


def _time(name: str, text: str) -> datetime:
    try:
        time = _EPOCH + timedelta(milliseconds=int(text)) if text.strip().isdigit() else datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise InvalidArgument(
            f"{name} cannot be {text!r}", "Give a time such as 2030-01-31T12:00:00Z, or milliseconds since 1970."
        ) from None
    require_zone(time)
    return time


def _max_rows(values: Mapping[str, str]) -> int | None:
    text = values.get("maxrowspertrigger", values.get("maxoffsetspertrigger"))
    if text is None:
        return None
    if not re.fullmatch(r"\s*[0-9]{1,30}\s*", text):
        raise InvalidArgument(f"maxRowsPerTrigger cannot be {text!r}", "Give a whole number of at least 1.")
    require("maxRowsPerTrigger", int(text))
    return int(text)


def boolean(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word not in ("true", "false"):
        raise InvalidArgument(f"{name} cannot be {text!r}", "Give true or false.")
    return word == "true"
