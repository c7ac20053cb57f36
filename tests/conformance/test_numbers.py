"""Numbers out of range: each verb of the façade, each of its numbers, by either way. A new verb is tried by itself."""

from __future__ import annotations

import typing
from collections.abc import Callable
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from tests.conformance.conftest import refused
from tests.conformance.probing import arguments, parameters

from custody import Custody, Outcome, Outgoing
from custody.errors import CustodyError, InvalidArgument, Terminal

pytestmark = [pytest.mark.core, pytest.mark.req("G20")]

WRONG: list[Any] = [-1, 0, 1.5, 2**31, 2**63, 2**64, float("inf"), float("nan"), True, "9" * 400, [1]]


def is_number_of(number: type, kind: Any) -> bool:
    """Whether a value of this kind may be such a number: by itself, or in a union or a list."""
    return kind is number or any(is_number_of(number, one) for one in typing.get_args(kind))


def is_number(kind: Any) -> bool:
    return is_number_of(int, kind) or is_number_of(float, kind)


OF_NO_SENSE = (float, bool, str, list)
FOREIGN = ("out of range for type", "does not exist", "numeric", "invalid input syntax", "bigint", "integer", "LIMIT")
"""What the database would say."""


def complaint(what: str, value: Any, kind: Any, call: Callable[[], object]) -> str | None:
    """What is wrong with the answer: a number is taken, or refused with an error of Custody that names it."""
    whole = not is_number_of(float, kind)
    try:
        call()
    except CustodyError as error:
        said = f"{error.code}: {error} {getattr(error, 'path', None)}"
        if not isinstance(error, Terminal) or error.code == "custody_error" or any(one in said for one in FOREIGN):
            return said
        if isinstance(error, InvalidArgument) and not any(one in said for one in {str(value), *what.split("_")}):
            return f"does not name it: {said}"
        if whole and isinstance(value, OF_NO_SENSE) and not isinstance(error, InvalidArgument):
            return f"for a value of no sense: {said}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    else:
        if whole and isinstance(value, OF_NO_SENSE):
            return "it was taken"
    return None


@pytest.mark.parametrize(("verb", "parameter"), list(parameters(is_number)))
def test_a_number_of_a_verb(tried: Custody, verb: str, parameter: str) -> None:
    kind = typing.get_type_hints(getattr(Custody, verb))[parameter]
    found = {}
    for value in WRONG:
        given: Any = value
        if "Mapping" in str(kind):
            given = {(0.5 if value == [1] else value): Outcome("ack")}
        elif "Sequence" in str(kind):
            given = [value]
        call = partial(getattr(tried, verb), **arguments(verb) | {parameter: given})
        found[str(value)[:20]] = complaint(parameter, value, kind, call)
    assert {value: said for value, said in found.items() if said is not None} == {}


@pytest.mark.parametrize("field", ["partition", "delay"])
def test_a_number_of_a_message(tried: Custody, field: str) -> None:
    kind = typing.get_type_hints(Outgoing)[field]
    found = {}
    for value in WRONG:
        message = Outgoing(1, **{"delay": "1h", field: value})
        found[str(value)[:20]] = complaint(field, value, kind, partial(tried.publish_delayed, "orders", [message]))
    assert {value: said for value, said in found.items() if said is not None} == {}


@pytest.mark.parametrize("name", ["partition", "offsets", "limit"])
def test_a_number_of_a_filter(tried: Custody, name: str) -> None:
    found = {}
    for value in WRONG:
        which = {"partition": 0, name: [value] if name == "offsets" else value}
        found[str(value)[:20]] = complaint(name, value, int, partial(tried.redrive, "orders", "stock", **which))
    assert {value: said for value, said in found.items() if said is not None} == {}


def test_a_number_of_an_event(tried: Custody) -> None:
    found = {}
    for value in WRONG:
        call = partial(tried.receive_events, "orders", [(UUID(int=7), value, Outgoing(1))])
        found[str(value)[:20]] = complaint("replays", value, int, call)
    assert {value: said for value, said in found.items() if said is not None} == {}
    for wrong in ("7", 7, None, b"7"):
        with refused("invalid_argument") as errors:
            tried.receive_events("orders", [(wrong, 0, Outgoing(1))])  # type: ignore[list-item]
        assert "event_id" in errors[0].message
    for rest in ({"partition": 0}, {"delay": "1h"}, {"priority": "low"}):
        with refused("invalid_argument") as errors:
            tried.receive_events("orders", [(UUID(int=7), 0, Outgoing(1, **rest))])  # type: ignore[arg-type]
        assert str(*rest) in errors[0].message
