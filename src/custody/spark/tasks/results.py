"""Turns what a batch handler returned into the outcomes and outputs of its messages. Runs in executors."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from custody.errors import InvalidPayload, TopicNotFound, did_you_mean
from custody.handlers import require_finished
from custody.model import codec
from custody.model.outcomes import Outcome
from custody.spark.causes import WrongResult
from custody.spark.expectations import UNMET
from custody.spark.tasks.halving import Answer, Failure
from custody.spark.tasks.job import Job
from custody.spark.tasks.marks import OUTCOME, marks_of, table_of, unmet_of
from custody.verbs.pipelines import Sink

Placing = tuple[Sink | None, int, codec.Encoded]
"""A topic (None: only sinks outside), its partition, and the row."""

_encode = msgspec.json.Encoder().encode


class Results:
    """Reads the results of one handler."""

    def __init__(self, job: Job) -> None:
        self._sinks, self._keeps = dict(job.sinks), job.keeps
        self._default = next(iter(job.sinks), None)
        self.first = None if self._default is None else job.sinks[self._default]
        self._layouts = {name: topic.layout for name, topic in job.sinks.items()}
        self._places: dict[tuple[str, str], int] = {}  # of keys that have been checked
        self._turn = random.randrange(1 << 16)

    def of(self, batch: pa.RecordBatch, returned: object) -> Answer[Placing]:
        """The outcomes and outputs of the messages of this batch, by their number in it."""
        if returned is None:
            return Answer({}, {})
        try:
            require_finished(returned, "the batch handler")
        except TypeError as error:
            raise WrongResult(str(error)) from None
        table = table_of(returned, "the batch handler returned")
        rows = _messages(batch, table)
        failed: dict[int, Failure] = {}
        if OUTCOME in table.column_names:
            for row, mark in zip(rows, marks_of(table), strict=True):
                if mark is not None:  # if several rows of a message are marked, the first counts
                    outcome = Outcome(mark["outcome"], error=mark.get("error"), delay=mark.get("delay"))
                    failed.setdefault(row, Failure(outcome))
        outputs: dict[int, list[Placing]] = defaultdict(list)
        if self._sinks or self._keeps:
            self._place(batch, table, rows, failed, outputs)
        unmet: dict[int, set[str]] = defaultdict(set)
        if UNMET in table.column_names:
            for row, names in zip(rows, unmet_of(table), strict=True):
                unmet[row].update(names)
        return Answer(failed, outputs, unmet)

    def _place(
        self,
        batch: pa.RecordBatch,
        table: pa.Table,
        rows: list[int],
        failed: dict[int, Failure],
        outputs: dict[int, list[Placing]],
    ) -> None:
        kinds, payloads, infinite = _payloads(batch, table, rows)
        names = _values(table, "_topic") or [None] * len(rows)
        keys = _values(table, "_key") if "_key" in table.column_names else _taken(batch, "_key", rows)
        headers = _values(table, "_headers") or [None] * len(rows)
        for number, row in enumerate(rows):
            if row in failed:
                continue
            try:
                if number in infinite:
                    raise InvalidPayload("JSON has no NaN and no infinity", "Return null instead.")
                outputs[row].append(
                    self._placed(names[number], keys[number], kinds[number], payloads[number], headers[number])
                )
            except (InvalidPayload, TopicNotFound) as error:
                cause = f"{type(error).__name__} in the batch"
                failed[row] = Failure(Outcome("nack", error=f"{type(error).__name__}: {error}"), cause)

    def _placed(self, name: str | None, key: str | None, kind: str, payload: Any, headers: Any) -> Placing:
        wanted = name or self._default
        topic = None if wanted is None else self._sinks.get(wanted)
        if wanted is not None and topic is None:
            known = did_you_mean(wanted, list(self._sinks))
            raise TopicNotFound(f"{wanted!r} is not a sink of the pipeline", f"Name it in sink=[…]. {known}")
        if payload is None:
            raise InvalidPayload("the batch handler returned a payload that is null")
        # Custody's headers about a delivery are not passed on to outputs
        named = headers and {k: v for k, v in dict(headers).items() if not k.startswith("x-custody-")}
        encoded = (key, kind.encode(), payload, codec.encode_headers(named) if named else None)
        if self._keeps and topic is self.first and kind == "b":
            raise InvalidPayload("bytes cannot be a row of a sink outside", "Return text or a JSON value.")
        if topic is None or wanted is None:
            codec.require_key(key)
            return None, 0, encoded
        if key is None:
            self._turn += 1
            return topic, self._layouts[wanted].place_turn(self._turn), encoded
        place = self._places.get((wanted, key))
        if place is None:
            codec.require_key(key)
            place = self._places[wanted, key] = self._layouts[wanted].place_key(key)
        return topic, place, encoded


def _messages(batch: pa.RecordBatch, table: pa.Table) -> list[int]:
    """For each row of the result the number of its message in the batch."""
    missing = [name for name in ("_partition", "_offset") if name not in table.column_names]
    if missing:
        raise WrongResult(
            f"the batch handler returned rows without {' and '.join(missing)}: each row keeps those of its message"
        )
    known = {where: row for row, where in enumerate(_places(batch))}
    rows = []
    for partition, offset in _places(table):
        row = known.get((partition, offset))
        if row is None:
            raise WrongResult(
                f"the batch handler returned a row of partition {partition}, offset {offset}, which is no message of "
                "its batch: keep _partition and _offset unchanged"
            )
        rows.append(row)
    return rows


def _places(rows: pa.RecordBatch | pa.Table) -> zip[tuple[Any, Any]]:
    return zip(rows.column("_partition").to_pylist(), rows.column("_offset").to_pylist(), strict=True)


def _values(table: pa.Table, name: str) -> list[Any]:
    return table.column(name).to_pylist() if name in table.column_names else []


def _taken(batch: pa.RecordBatch, name: str, rows: list[int]) -> list[Any]:
    values = batch.column(name).to_pylist()
    return [values[row] for row in rows]


def _payloads(batch: pa.RecordBatch, table: pa.Table, rows: list[int]) -> tuple[list[str], list[Any], set[int]]:
    """Kind and payload of each row, and the rows whose numbers JSON does not have."""
    data = [name for name in table.column_names if not name.startswith("_")]
    if not data:
        if "_payload" not in table.column_names:
            return _taken(batch, "_kind", rows), _taken(batch, "_payload", rows), set()
        kinds = _values(table, "_kind") if "_kind" in table.column_names else _taken(batch, "_kind", rows)
        return kinds, [_stored(payload) for payload in _values(table, "_payload")], set()
    infinite: set[int] = set()
    columns = []
    for name in data:
        column = _plain(table.column(name))
        if pa.types.is_floating(column.type):
            finite = pc.fill_null(pc.is_finite(column), True).to_numpy()
            if not finite.all():
                infinite.update(np.flatnonzero(~finite).tolist())
        columns.append(column.to_pylist(maps_as_pydicts="strict"))
    try:
        payloads = [_encode(dict(zip(data, values, strict=True))) for values in zip(*columns, strict=True)]
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise WrongResult(f"the batch handler returned columns that JSON does not have: {error}") from None
    return ["j"] * len(rows), payloads, infinite


def _stored(payload: Any) -> Any:
    """A payload that is published unchanged, which a handler may also give as text."""
    if isinstance(payload, str):
        return payload.encode()
    return payload


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column with values that JSON has a form for: times have microseconds."""
    if pa.types.is_timestamp(column.type) and column.type.unit == "ns":
        return column.cast(pa.timestamp("us", column.type.tz), safe=False)
    return column
