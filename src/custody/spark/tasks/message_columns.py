"""The messages of a batch handler: the fields of their payloads as Arrow columns, beside Custody's own columns.

Runs in executors, without Spark's JVM. Payloads are parsed by Arrow, all at once. What it refuses is read again one by
one, by the rules of `schema`, which also finds the payloads that do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from custody.errors import InvalidPayload
from custody.spark.tasks.schema import checker

OWN = ("_partition", "_offset", "_key", "_kind", "_payload", "_headers", "_attempt", "_published_at")
"""Custody's columns, which a batch has after the fields of the schema."""
_TYPES = {
    "byte": pa.int8(), "short": pa.int16(), "integer": pa.int32(), "long": pa.int64(), "float": pa.float32(),
    "double": pa.float64(), "boolean": pa.bool_(), "string": pa.string(),
}  # fmt: skip


class MessageColumns:
    """Makes the batches of a handler, given the schema of the pipeline (`jsonValue()` of a StructType)."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._check = None if schema is None else checker(schema)
        fields = [] if schema is None else [(field["name"], _arrow(field["type"])) for field in schema["fields"]]
        self._schema = pa.schema(fields)
        self._parse = arrow_json.ParseOptions(explicit_schema=self._schema, unexpected_field_behavior="ignore")
        self._quick = bool(fields) and not any(_has_map(kind) for _, kind in fields)

    def of(self, messages: pa.RecordBatch) -> tuple[pa.RecordBatch, dict[int, str]]:
        """The batch for the handler, and the errors of the payloads that do not fit, by their row."""
        found, malformed = self._fields(messages), dict[int, str]()
        if found is None:
            found, malformed = self._singly(messages)
        own = [messages.column(name) for name in OWN]
        schema = pa.schema([*self._schema, *(messages.schema.field(name) for name in OWN)])
        return pa.RecordBatch.from_arrays([*found, *own], schema=schema), malformed

    def _fields(self, messages: pa.RecordBatch) -> list[pa.Array] | None:
        """The fields of all payloads; None if Arrow cannot tell."""
        if self._check is None:
            return []
        kinds, payloads, count = messages.column("_kind"), messages.column("_payload"), messages.num_rows
        if not self._quick or count == 0 or not pc.all(pc.equal(kinds, "j")).as_py():
            return None
        # with braces at both ends, as many rows as payloads means a row for each
        if not pc.all(pc.and_(pc.starts_with(payloads, "{"), pc.ends_with(payloads, "}"))).as_py():
            return None
        lines = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), payloads), b"\n")[0]
        buffer = lines.as_buffer()
        options = arrow_json.ReadOptions(use_threads=False, block_size=buffer.size + 1)
        try:
            table = arrow_json.read_json(pa.BufferReader(buffer), options, self._parse)
        except pa.ArrowException:
            return None
        if table.num_rows != count:
            return None
        return [table.column(name).combine_chunks() for name in self._schema.names]

    def _singly(self, messages: pa.RecordBatch) -> tuple[list[pa.Array], dict[int, str]]:
        assert self._check is not None
        rows: list[dict[str, Any]] = []
        malformed: dict[int, str] = {}
        pairs = zip(messages.column("_kind").to_pylist(), messages.column("_payload").to_pylist(), strict=True)
        for number, (kind, payload) in enumerate(pairs):
            fields: dict[str, Any] = {}
            try:
                fields = self._check(kind, payload)
            except InvalidPayload as error:
                malformed[number] = str(error)
            rows.append(fields)
        columns = []
        for field in self._schema:
            values = [_value(field.type, row.get(field.name)) for row in rows]
            columns.append(pa.array(values, field.type))
        return columns, malformed


def _arrow(kind: Any) -> pa.DataType:
    """The Arrow type of a field. Types that JSON lacks are text, as for a handler of single messages."""
    if isinstance(kind, str):
        return _TYPES.get(kind, pa.string())
    if kind["type"] == "struct":
        return pa.struct([(field["name"], _arrow(field["type"])) for field in kind["fields"]])
    if kind["type"] == "array":
        return pa.list_(_arrow(kind["elementType"]))
    if kind["type"] == "map" and kind["keyType"] == "string":
        return pa.map_(pa.string(), _arrow(kind["valueType"]))
    return pa.string()


def _has_map(kind: pa.DataType) -> bool:
    return pa.types.is_map(kind) or any(_has_map(kind.field(number).type) for number in range(kind.num_fields))


def _value(kind: pa.DataType, value: Any) -> Any:
    """The value as Arrow takes it for this type."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if pa.types.is_struct(kind):
        return {field.name: _value(field.type, value.get(field.name)) for field in kind}
    if pa.types.is_list(kind):
        return [_value(kind.value_type, one) for one in value]
    if pa.types.is_map(kind):
        return [(key, _value(kind.item_type, one)) for key, one in value.items()]
    return value
