"""Packed arrays: the server reads what was given."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from custody.store import packed
from custody.store.packed import Packed

pytestmark = pytest.mark.core

BYTES = [b"", b"\0\xff", b"x" * 70_000]
TEXTS = ["", "key", None, "🦉", "ü" * 1000]


@pytest.mark.parametrize(
    ("array", "type_name", "values"),
    [
        pytest.param(packed.texts(TEXTS), "text[]", TEXTS, id="texts"),
        pytest.param(packed.texts([]), "text[]", [], id="no texts"),
        pytest.param(
            packed.documents([None, b"{}", b'{"a": "\xc3\xbc"}']), "text[]", [None, "{}", '{"a": "ü"}'], id="doc"
        ),
        pytest.param(packed.documents([None, None]), "text[]", [], id="no documents"),
        pytest.param(packed.byte_strings(BYTES), "bytea[]", BYTES, id="bytes"),
        pytest.param(packed.letters([b"j", b"t", b"b"]), '"char"[]', ["j", "t", "b"], id="letters"),
        pytest.param(packed.integers([0, -1, 2**31 - 1]), "integer[]", [0, -1, 2**31 - 1], id="integers"),
        pytest.param(packed.integers([]), "integer[]", [], id="no integers"),
    ],
)
def test_the_server_reads_what_was_given(
    db: psycopg.Connection, array: Packed, type_name: str, values: list[Any]
) -> None:
    packed.register(db)
    query = "SELECT a, pg_typeof(a)::text FROM (SELECT %b) x (a)"
    assert db.execute(query, [array]).fetchone() == (values, type_name)
