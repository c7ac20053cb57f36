"""Payloads, keys and headers come back as they went in, or are refused."""

from __future__ import annotations

import collections
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from custody.errors import InvalidPayload
from custody.model.codec import decode, encode, encode_headers, encode_message
from custody.model.entities import Outgoing

text = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | text,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    """As it is written, and as it is read."""
    kind, data = encode(value)
    return decode(kind.decode(), data)


def identical(one: Any, other: Any) -> bool:
    """Equal, and of the same types throughout: True is not 1, and 1 is not 1.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(identical(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(identical, one, other))
    return bool(one == other) and (not isinstance(one, float) or math.copysign(1, one) == math.copysign(1, other))


@pytest.mark.req("G3")
@given(json_values)
def test_a_json_value_comes_back_the_same(value: Any) -> None:
    assert identical(there_and_back(value), value)


@pytest.mark.req("G3")
@given(text)
def test_text_comes_back_the_same(value: str) -> None:
    kind, data = encode(value)
    assert kind == b"t"
    assert decode("t", data) == value


@pytest.mark.req("G3")
@given(st.binary())
def test_bytes_come_back_the_same(value: bytes) -> None:
    for given_as in (value, bytearray(value), memoryview(value)):
        kind, data = encode(given_as)
        assert kind == b"b"
        assert decode("b", data) == value


@pytest.mark.req("G3")
@pytest.mark.parametrize("value", ["", "\0", "a\0b", "🦉 ünï", "\u2028", {"a\0": "\0"}, [], {}, 0, False, None, 2**80])
def test_odd_values_come_back_the_same(value: Any) -> None:
    assert identical(there_and_back(value), value)


def endless() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.req("G3")
@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, [1, -math.inf], {1: "int key"}, {None: 1}, (1, 2), {"inner": (1,)}, {1, 2}),
        *([b"bytes"], {"inner": {1}}, object(), 1j),
        *("\ud800", {"a": "\udfff"}, {"\ud800": 1}, Outgoing(1), endless()),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0],
)
def test_what_would_come_back_as_something_else_is_refused(value: Any) -> None:
    with pytest.raises(InvalidPayload):
        encode(value)


def test_a_kind_of_dict_counts_as_a_dict() -> None:
    assert there_and_back(collections.OrderedDict(a=1)) == {"a": 1}


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), text, max_size=3))
def test_headers_are_text_by_name(headers: dict[str, str]) -> None:
    if any("\0" in value for value in headers.values()):
        with pytest.raises(InvalidPayload, match="NUL"):
            encode_headers(headers)
    else:
        encoded = encode_headers(headers)
        assert (decode("j", encoded) if encoded else {}) == headers


@pytest.mark.parametrize(
    "bad", [{"a": 1}, {1: "a"}, {"a": None}, {"a": b"x"}, {"a\0": "x"}, {"a": "\0"}, {"a": "\ud800"}]
)
def test_other_headers_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidPayload, match="header"):
        encode_headers(bad)


@pytest.mark.parametrize("bad", [1, b"key", "a\0b", "\ud800", ("a",)])
def test_a_key_that_is_no_storable_text_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidPayload, match="key"):
        encode_message(Outgoing(1, key=bad))


def test_an_empty_key_is_a_key() -> None:
    assert encode_message(Outgoing(1, key=""))[0] == ""
