"""Payloads as Arrow columns: what Arrow parses at once is what the schema's check reads one by one."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from custody.spark.tasks.message_columns import MessageColumns

pytestmark = pytest.mark.req("X8")

NESTED = {"type": "struct", "fields": [{"name": "x", "type": "double"}]}
FIELDS: list[tuple[str, Any]] = [
    ("n", "long"),
    ("small", "byte"),
    ("text", "string"),
    ("amount", "double"),
    ("yes", "boolean"),
    ("at", "timestamp"),
    ("list", {"type": "array", "elementType": "integer"}),
    ("inner", NESTED),
]
NAMES = [name for name, _ in FIELDS]


def schema(*more: tuple[str, Any]) -> dict[str, Any]:
    return {"type": "struct", "fields": [{"name": name, "type": kind} for name, kind in (*FIELDS, *more)]}


def messages(payloads: list[bytes], kinds: str | None = None) -> pa.RecordBatch:
    count = len(payloads)
    columns = {
        "_partition": pa.array([0] * count, pa.int32()),
        "_offset": pa.array(range(count), pa.int64()),
        "_key": pa.array([None] * count, pa.string()),
        "_kind": pa.array([*(kinds or "j" * count)], pa.string()),
        "_payload": pa.array(payloads, pa.binary()),
        "_headers": pa.nulls(count, pa.map_(pa.string(), pa.string())),
        "_attempt": pa.array([1] * count, pa.int32()),
        "_published_at": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * count, pa.timestamp("us", "UTC")),
    }
    return pa.RecordBatch.from_pydict(columns)


FITS = [
    b'{"n":1,"small":-128,"text":"a\\u00e9\\n","amount":1,"yes":true,"at":"2026-01-01","list":[1,null],"inner":{"x":1}}',
    b'{"more":{"deep":[1,{}]},"text":null}',
    b"{}",
    b'{"n":-9223372036854775808,"inner":{},"list":[]}',
]


@pytest.mark.parametrize("first", [0, 1, 3])
def test_both_ways_read_the_same(first: int) -> None:
    """Also from a slice of a batch."""
    columns = MessageColumns(schema())
    batch = messages(FITS).slice(first)
    found, malformed = columns.of(batch)
    assert columns._fields(batch) is not None, "Arrow did not read it"
    singly, _ = columns._singly(batch)
    assert found.select(NAMES).to_pylist() == pa.RecordBatch.from_arrays(singly, NAMES).to_pylist()
    assert not malformed
    assert found.schema.names == [*NAMES, *batch.schema.names]
    assert found.column("_offset").to_pylist() == [*range(first, 4)]


@pytest.mark.parametrize(
    ("payload", "kind", "told"),
    [
        (b'{"n":"1"}', "j", "Expected `int | null`, got `str`"),
        (b'{"small":128}', "j", "127"),
        (b'{"text":5}', "j", "Expected `str | null`, got `int`"),
        (b'{"yes":1}', "j", "Expected `bool | null`"),
        (b"[1]", "j", "Expected `object`"),
        (b"null", "j", "Expected `object`"),
        (b'{"n":1', "j", "truncated"),
        (b'{"n":1}{"n":2}', "j", "trailing characters"),
        (b'{"list":["a"]}', "j", "list"),
        (b"{}", "t", "the payload is text"),
        (b"{}", "b", "the payload is bytes"),
    ],
)
def test_a_payload_that_does_not_fit_is_malformed_alone(payload: bytes, kind: str, told: str) -> None:
    found, malformed = MessageColumns(schema()).of(messages([b'{"n":7}', payload, b"{}"], f"j{kind}j"))
    assert [*malformed] == [1]
    assert told in malformed[1]
    assert found.column("n").to_pylist() == [7, None, None]


def test_what_only_one_way_can_read_is_read_all_the_same() -> None:
    columns = MessageColumns(schema(("map", {"type": "map", "keyType": "string", "valueType": "integer"})))
    payload = b' {"n":5,"at":17,\n"map":{"a":1,"b":null}, "n":6}'
    found, malformed = columns.of(messages([payload]))
    assert not malformed
    assert found.column("n").to_pylist() == [6]
    assert found.column("at").to_pylist() == ["17"]
    assert found.column("map").to_pylist() == [[("a", 1), ("b", None)]]


def test_without_a_schema_there_are_only_the_own_columns() -> None:
    batch = messages([b"\xff", b"text"], "bt")
    found, malformed = MessageColumns(None).of(batch)
    assert found == batch
    assert not malformed
