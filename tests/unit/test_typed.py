"""Typed payloads: what each type is in JSON, what comes back as which type, and what does not fit."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pydantic
import pytest

from custody.errors import InvalidArgument, InvalidPayload, PayloadMismatch
from custody.handlers import handler
from custody.model.codec import decode, encode
from custody.model.entities import Message, Outgoing
from custody.model.outcomes import outcome_of

pytestmark = [pytest.mark.core, pytest.mark.req("X12")]

ID = UUID("3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e")
AT = datetime(2030, 1, 31, 12, tzinfo=UTC)


class Size(Enum):
    SMALL = "s"


@dataclass
class Line:
    sku: str
    price: Decimal


@dataclass
class Order:
    id: UUID
    at: datetime
    lines: list[Line]
    tags: tuple[str, ...] = ()
    size: Size = Size.SMALL
    seal: bytes = b""
    counts: dict[int, int] = field(default_factory=dict)


class Struct(msgspec.Struct):
    total: Decimal
    order: Order | None = None


class Model(pydantic.BaseModel):
    total: Decimal
    at: datetime
    line: Line
    inner: list[Model] = []
    number: int = pydantic.Field(default=0, alias="no")


ORDER = Order(ID, AT, [Line("a", Decimal("1.10"))], ("x", "y"), Size.SMALL, b"\0", {1: 2})
MODEL = Model(total=Decimal("1.10"), at=AT, line=Line("a", Decimal(1)), inner=[], no=3)


def published(payload: Any) -> Any:
    """The payload as a consumer gets it."""
    kind, data = encode(payload)
    return decode(kind.decode(), data)


def message(payload: Any) -> Message:
    return Message(topic="t", partition=0, offset=0, key=None, payload=payload, headers={}, attempt=1, published_at=AT)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (ID, str(ID)),
        (AT, "2030-01-31T12:00:00Z"),
        (date(2030, 1, 31), "2030-01-31"),
        (time(12, 30), "12:30:00"),
        (timedelta(seconds=90), "PT90S"),
        (Decimal("1.10"), "1.10"),
        (Size.SMALL, "s"),
        ({"id": ID, "prices": [Decimal("1.10")]}, {"id": str(ID), "prices": ["1.10"]}),
        (Line("a", Decimal("1.10")), {"sku": "a", "price": "1.10"}),
        (Struct(Decimal("2")), {"total": "2", "order": None}),
        (
            ORDER,
            {
                "id": str(ID),
                "at": "2030-01-31T12:00:00Z",
                "lines": [{"sku": "a", "price": "1.10"}],
                "tags": ["x", "y"],
                "size": "s",
                "seal": "AA==",
                "counts": {"1": 2},
            },
        ),
        (
            {"model": MODEL},
            {
                "model": {
                    "total": "1.10",
                    "at": "2030-01-31T12:00:00Z",
                    "line": {"sku": "a", "price": "1"},
                    "inner": [],
                    "no": 3,
                }
            },
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_typed_value_is_plain_json(value: Any, stored: Any) -> None:
    assert published(value) == stored


@pytest.mark.parametrize("value", [ORDER, MODEL, Struct(Decimal("2"), ORDER), ID, AT, Decimal("1.10"), Size.SMALL])
def test_a_consumer_gets_it_back_by_its_type(value: Any) -> None:
    assert message(published(value)).as_(type(value)) == value


def test_a_plain_type_is_checked_too() -> None:
    assert message([1, 2]).as_(list[int]) == [1, 2]
    assert message(b"raw").as_(bytes) == b"raw"
    assert message(ORDER).as_(Order) is ORDER, "a worker may have decoded it already"
    with pytest.raises(PayloadMismatch):
        message(True).as_(int)


@pytest.mark.req("G3")
@pytest.mark.parametrize(
    "value",
    [
        {"at": AT, "inner": (1,)},
        {"id": ID, 0: 1},
        {"id": ID, "x": math.nan},
        Struct(Decimal(1), object()),  # type: ignore[arg-type]
        Line("\ud800", Decimal(1)),
        dataclass(type("Loss", (), {"__annotations__": {"rate": float}}))(math.nan),
        Outgoing({"x": 1}),
        message(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_json_would_change_is_refused_also_in_typed_values(value: Any) -> None:
    with pytest.raises(InvalidPayload):
        encode(value)


@pytest.mark.parametrize(
    ("payload", "kind", "path"),
    [
        ({"sku": "a"}, Line, "$"),
        ({"sku": "a", "price": "dear"}, Line, "$.price"),
        ({"total": 1, "order": {**published(ORDER), "lines": [{"sku": 1}]}}, Struct, "$.order.lines[0].sku"),
        ({**published(MODEL), "inner": [{"total": 1}]}, Model, "$.inner[0].at"),
        ("text", Model, "$"),
        (b"bytes", Model, "$"),
        (b"bytes", Line, "$"),
    ],
)
def test_what_does_not_fit_is_dead_at_once_with_the_path_of_the_field(payload: Any, kind: type, path: str) -> None:
    with pytest.raises(PayloadMismatch) as caught:
        message(payload).as_(kind)
    assert caught.value.path == path
    outcome = outcome_of(caught.value)
    assert outcome.kind == "dead"
    assert f"does not fit {kind.__name__}: {path}: " in (outcome.error or "")


def test_a_type_that_cannot_be_decoded_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="cannot be decoded"):
        handler(payload=int | set[list[complex]] | Struct | Line)  # type: ignore[arg-type]


def test_pydantic_is_not_imported_unless_the_program_does() -> None:
    program = (
        "import sys, custody\n"
        "from dataclasses import dataclass\n"
        "from custody.model.codec import encode\n"
        "Line = dataclass(type('Line', (), {'__annotations__': {'sku': str}}))\n"
        "assert encode({'line': Line('a')}) == (b'j', b'{\"line\":{\"sku\":\"a\"}}')\n"
        "assert 'pydantic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
