"""Texts that could not be stored, or are none: each verb of the façade, each of its texts, by either way."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any

import pytest
from tests.conformance.conftest import refused
from tests.conformance.probing import arguments, parameters

from custody import Custody, Outgoing
from custody.errors import CustodyError, InvalidArgument, Terminal

pytestmark = [pytest.mark.core, pytest.mark.req("G20")]

NO_TEXT: list[Any] = ["a\0b", "half \ud800", b"bytes", 7, True, 1.5, ["a"], {"a": "b"}]
STRANGE = [
    "",
    " ",
    "a\nb",
    "a/b",
    "../..",
    "%2e",
    "a?b#c",
    "\u043erders",
    "e\u0301",
    "x" * 10_000,
    "\U0001f600",
    "'; --",
]
FOREIGN = ("does not exist", "invalid byte", "NUL (0x00)", "btree", "index row", "syntax", "bytea", "smallint")
"""What the database would say."""


def is_text(kind: Any) -> bool:
    return kind is str or (
        type(None) in typing.get_args(kind) and str in typing.get_args(kind) and len(typing.get_args(kind)) == 2
    )


def complaint(what: str, value: Any, call: partial[Any]) -> str | None:
    """What is wrong with the answer: a text is taken, or refused by Custody; what is no text is refused by its name."""
    try:
        call()
    except CustodyError as error:
        said = f"{error.code}: {error} {getattr(error, 'path', None)}"
        if not isinstance(error, Terminal) or error.code == "custody_error" or any(one in said for one in FOREIGN):
            return said
        if error.code == "needs_database":
            return None
        if value in NO_TEXT and not (isinstance(error, InvalidArgument) and what in said) and what != "error":
            return f"does not name it: {said}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    else:
        if value in NO_TEXT and what != "error":
            return "it was taken"
    return None


@pytest.mark.parametrize(("verb", "parameter"), list(parameters(is_text)))
def test_a_text_of_a_verb(tried: Custody, verb: str, parameter: str) -> None:
    found = {}
    for value in [*NO_TEXT, *STRANGE]:
        call = partial(getattr(tried, verb), **arguments(verb) | {parameter: value})
        found[repr(value)[:20]] = complaint(parameter, value, call)
    assert {value: said for value, said in found.items() if said is not None} == {}


STRANGE_FIELDS = ["a\0b", "half \ud800", b"bytes", 7, True, ["a"], [], {"h": 1}, {1: "h"}, {"h\0": ""}, object()]


@pytest.mark.parametrize("field", ["key", "headers", "routing_key", "priority", "deliver_at", "delay"])
@pytest.mark.parametrize("value", STRANGE_FIELDS, ids=lambda value: type(value).__name__)
def test_a_field_of_a_message(tried: Custody, field: str, value: Any) -> None:
    if field == "delay" and value == 7:
        return  # seconds
    timed = field in ("delay", "deliver_at")
    message = Outgoing(1, **{field: value, **({} if timed else {"delay": "1h"})})
    ways: list[Callable[..., object]] = [tried.publish_delayed, tried.init_producer("q").publish_delayed]
    if not timed:
        ways.append(lambda topic, messages: tried.publish_many(topic, [replace(one, delay=None) for one in messages]))
    before = tried.topic("orders").message_count, tried.delayed_count("orders")
    for publish in ways:
        with pytest.raises(InvalidArgument) as found:
            publish("orders", [message])
        assert not any(one in str(found.value) for one in FOREIGN), found.value
    assert (tried.topic("orders").message_count, tried.delayed_count("orders")) == before


def test_a_time_without_a_zone_is_refused_everywhere(tried: Custody) -> None:
    naive = datetime(2030, 1, 1)
    for call in (
        lambda: tried.publish("orders", 1, deliver_at=naive),
        lambda: tried.read("orders", time=naive),
        lambda: tried.rewind("orders", "stock", to_time=naive),
        lambda: tried.create_group("orders", "naive", start=naive),
        lambda: tried.redrive("orders", "stock", died_from=naive),
        lambda: tried.discard("orders", "stock", died_until=naive),
    ):
        with refused("invalid_argument") as errors:
            call()
        assert "time zone" in errors[0].message
