"""Routing keys, patterns and header conditions, as Python has them."""

from __future__ import annotations

import pytest

from custody import Binding, Message, Outgoing
from custody.errors import InvalidArgument, InvalidPayload
from custody.model.codec import encode_message
from custody.model.routing import ROUTING_KEY, bindings_of

pytestmark = [pytest.mark.core, pytest.mark.req("V11")]

PATTERNS = {
    "orders": {"orders"},
    "orders.*": {"orders.eu", "orders.eux", "orders.a+b"},
    "*.eu": {"orders.eu"},
    "*.*.created": {"orders.eu.created", "orders.ü.created"},
    "orders.>": {
        *("orders.eu", "orders.eux", "orders.a+b", "orders.eu.created", "orders.ü.created", "orders.eu.created.late"),
    },
    "orders.*.>": {"orders.eu.created", "orders.ü.created", "orders.eu.created.late"},
    "orders.a+b": {"orders.a+b"},
    "orders.ü.created": {"orders.ü.created"},
    ">": {
        *("orders", "order", "orders.eu", "orders.a+b", "orders.eu.created", "orders.ü.created"),
        *("orders.eu.created.late", "ordersxeu", "orders.eux", "line\nbreak"),
    },
}
KEYS = sorted(PATTERNS[">"])
REFUSED_PATTERNS = ["", ".", "a.", ".a", "a..b", "a*", "a.*b", "**", "a.>.b", ">.a", "a>", "a\0b", "a" * 1001]
REFUSED_KEYS = ["", ".", "a.", ".a", "a..b", "*", "a.*", "a.>", "a>b", "a\0b", "a" * 1001]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_whole_segments_and_nothing_else(pattern: str) -> None:
    assert {key for key in KEYS if Binding(pattern).matches({ROUTING_KEY: key})} == PATTERNS[pattern]
    assert not Binding(pattern).matches({})


def test_header_conditions_have_to_hold_all_of_them() -> None:
    bound = Binding("orders.>", headers={"region": "eu", "kind": "paid"})
    headers = {ROUTING_KEY: "orders.1", "region": "eu", "kind": "paid"}
    assert bound.matches({**headers, "more": "x"})
    assert not bound.matches({**headers, "kind": "sent"})
    assert not bound.matches({name: value for name, value in headers.items() if name != "region"})
    assert not bound.matches({**headers, ROUTING_KEY: "stock"})
    assert Binding(headers={"region": "eu"}).matches({"region": "eu"})  # without a pattern no routing key is needed


@pytest.mark.parametrize("pattern", REFUSED_PATTERNS)
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a pattern"):
        Binding(pattern)


def test_a_binding_with_too_many_segments_or_conditions_is_refused() -> None:
    Binding(".".join("a" * 32), headers={str(n): "x" for n in range(20)})
    with pytest.raises(InvalidArgument, match="not a pattern"):
        Binding(".".join("a" * 33))
    with pytest.raises(InvalidArgument, match="at most 20"):
        Binding("a", headers={str(n): "x" for n in range(21)})


def test_a_binding_of_nothing_or_of_no_text_is_refused() -> None:
    for given in ({}, {"headers": {}}, {"headers": {"n": 1}}, {"headers": {"n": "\0"}}, {"pattern": 7}):
        with pytest.raises(InvalidArgument):
            Binding(**given)  # type: ignore[arg-type]


def test_a_plain_text_is_a_pattern() -> None:
    assert bindings_of(["a.*", Binding(headers={"h": "1"})]) == (Binding("a.*"), Binding(headers={"h": "1"}))
    assert bindings_of("a.*") == (Binding("a.*"),)
    assert bindings_of(None) == bindings_of([]) == ()
    assert len({Binding("a", headers={"h": "1"}), Binding("a", headers={"h": "1"})}) == 1
    assert str(Binding("a.>", headers={"h": "1"})) == "a.> and h=1"


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_what_is_no_routing_key_is_refused_however_it_comes(key: str) -> None:
    with pytest.raises(InvalidPayload):
        encode_message(Outgoing(1, routing_key=key))
    with pytest.raises(InvalidPayload):
        encode_message(Outgoing(1, headers={ROUTING_KEY: key}))


def test_the_routing_key_is_a_header() -> None:
    assert encode_message(Outgoing(1, routing_key="a.b"))[3] == b'{"x-custody-routing-key":"a.b"}'
    both = Outgoing(1, headers={"h": "1", ROUTING_KEY: "old"}, routing_key="new")
    assert encode_message(both)[3] == b'{"h":"1","x-custody-routing-key":"new"}'
    assert encode_message(Outgoing(1))[3] is None
    with pytest.raises(InvalidPayload):
        encode_message(Outgoing(1, routing_key=7))  # type: ignore[arg-type]


def test_a_message_knows_its_routing_key() -> None:
    from datetime import UTC, datetime

    given = {"topic": "t", "partition": 0, "offset": 0, "key": None, "payload": 1, "attempt": 1}
    at = datetime(2030, 1, 1, tzinfo=UTC)
    assert Message(**given, headers={ROUTING_KEY: "a.b"}, published_at=at).routing_key == "a.b"  # type: ignore[arg-type]
    assert Message(**given, headers={}, published_at=at).routing_key is None  # type: ignore[arg-type]
