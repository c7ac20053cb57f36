"""The schemas of `format("custody")`, and the conversion of the database's Arrow batches to them. Runs anywhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

_STRING, _INT, _LONG, _TIME, _BYTES = StringType(), IntegerType(), LongType(), TimestampType(), BinaryType()
_HEADERS = MapType(_STRING, _STRING)


def _struct(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


EVENTS = _struct(
    topic=_STRING,
    partition=_INT,
    offset=_LONG,
    key=_STRING,
    payload=_BYTES,
    payload_kind=_STRING,
    headers=_HEADERS,
    published_at=_TIME,
)
"""A message as it is in the log. `payload_kind` is json, text or bytes; without headers the map is empty."""

DELIVERIES = _struct(
    topic=_STRING,
    partition=_INT,
    event_offset=_LONG,
    consumer_group=_STRING,
    key=_STRING,
    status=_STRING,
    attempts=_INT,
    run_at=_TIME,
    locked_at=_TIME,
    locked_by=_STRING,
    last_error=_STRING,
    updated_at=_TIME,
)

DEAD_LETTERS = _struct(
    topic=_STRING,
    consumer_group=_STRING,
    partition=_INT,
    offset=_LONG,
    key=_STRING,
    payload=_STRING,
    payload_kind=_STRING,
    payload_bytes=_BYTES,
    headers=_HEADERS,
    published_at=_TIME,
    attempts=_INT,
    failures=_INT,
    reason=_STRING,
    last_error=_STRING,
    last_traceback=_STRING,
    errors=ArrayType(_STRING),
    first_delivery=_TIME,
    first_failure=_TIME,
    died_at=_TIME,
    held=BooleanType(),
)

JOURNAL = _struct(
    entry=_LONG,
    at=_TIME,
    topic=_STRING,
    consumer_group=_STRING,
    partition=_INT,
    offsets=_STRING,
    kind=_STRING,
    lease_id=_STRING,
    worker=_STRING,
    error=_STRING,
    detail=_STRING,
)
"""The view `history`: `offsets` is a multirange as text, `detail` JSON."""

TABLES = {"events": EVENTS, "deliveries": DELIVERIES, "dead_letters": DEAD_LETTERS, "journal": JOURNAL}

_decode = msgspec.json.Decoder().decode


@cache
def _kinds() -> tuple[pa.Array, pa.Array]:
    """Letters and names. Created lazily: the first Arrow array imports pandas, which planning does not need."""
    return pa.array(["j", "t", "b"]), pa.array(["json", "text", "bytes"])


def _kind_names(letters: pa.Array) -> pa.Array:
    known, names = _kinds()
    return names.take(pc.index_in(letters, value_set=known))


def event_batch(topic: str, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch of `arrow.events` with the columns of EVENTS."""
    return fitted(
        EVENTS,
        {
            "topic": pa.repeat(topic, batch.num_rows),
            "payload_kind": _kind_names(batch.column("kind")),
            **{name: batch.column(name) for name in batch.schema.names},
        },
    )


def fitted(schema: StructType, columns: dict[str, pa.Array]) -> pa.RecordBatch:
    """Exactly the columns of the schema, in its order and with the types that Spark expects."""
    wanted = to_arrow_schema(schema, timezone="UTC")
    return pa.RecordBatch.from_arrays([_column(columns[field.name], field.type) for field in wanted], schema=wanted)


def _column(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_map(kind):
        return _maps(values, kind)
    return values if values.type.equals(kind) else values.cast(kind)


def _maps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """JSON objects as maps of text. Other JSON, which SQL could have written, must not fail the whole read."""
    ends, names, values = [0], list[str](), list[str]()
    if texts.null_count == len(texts):
        ends = [0] * (len(texts) + 1)
    else:
        for text in texts.to_pylist():
            headers = None if text is None else _decode(text)
            if isinstance(headers, dict):
                names.extend(headers)
                values.extend(map(_as_text, headers.values()))
            ends.append(len(names))
    return pa.MapArray.from_arrays(
        pa.array(ends, pa.int32()), pa.array(names, pa.string()), pa.array(values, pa.string()), type=kind
    )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
