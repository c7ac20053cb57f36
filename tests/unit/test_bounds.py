"""Which numbers and texts verbs take, and that a class of verbs checks its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import custody
from custody.errors import InvalidArgument, PartitionNotFound
from custody.model.bounds import Bounded, require, require_each, require_text
from custody.model.limits import LARGE, SMALL
from custody.spark.format.options import ReadOptions


class Verbs(Bounded):
    def take(
        self,
        topic: str,
        offset: int | None = None,
        *,
        offsets: Sequence[int] | None = None,
        outcomes: Mapping[int, str] | None = None,
        error: str | None = None,
    ) -> str:
        return f"{topic} {offset} {offsets} {outcomes} {error}"


@pytest.mark.parametrize("given", [{"offset": None}, {"offset": -LARGE}, {"offset": LARGE}, {"offsets": []}])
def test_what_fits_is_taken(given: dict[str, Any]) -> None:
    assert Verbs().take("orders", **given).startswith("orders")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"offset": LARGE + 1}, "offset cannot be 92233720"),
        ({"offset": True}, "offset cannot be True"),
        ({"offset": float("nan")}, "offset cannot be nan"),
        ({"offsets": [1, 2**64]}, "offsets cannot be 18446744073709551616"),
        ({"offsets": "12"}, "offsets cannot be '12'. Give a list"),
        ({"outcomes": {0.5: "ack"}}, "outcomes cannot be 0.5"),
        ({"topic": "a\0b"}, "topic has a NUL"),
        ({"topic": b"a"}, "topic cannot be b'a'. It is a string"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Verbs().take(**{"topic": "orders", **given})


def test_places_count_as_names_do() -> None:
    with pytest.raises(InvalidArgument, match="offset cannot be '1'"):
        Verbs().take("orders", "1")  # type: ignore[arg-type]


def test_an_error_is_never_refused() -> None:
    assert Verbs().take("orders", error="a\0b").endswith("a\0b")


def test_each_has_its_bounds() -> None:
    with pytest.raises(PartitionNotFound):
        require("partition", SMALL + 1)
    with pytest.raises(InvalidArgument, match=r"limit cannot be -1\. It is a whole number from 0 to 2,147,483,647"):
        require("limit", -1)
    with pytest.raises(InvalidArgument, match="producer_id has more than 200 characters"):
        require_text("producer_id", "p" * 201)
    require_each("offsets", (1, 2))


@pytest.mark.parametrize("size", [0, -1, 2**31, True, "10", float("inf")])
def test_the_size_of_a_pool(size: Any) -> None:
    with pytest.raises(InvalidArgument, match="pool_size cannot be"):
        custody.connect("postgresql://nowhere.invalid/", pool_size=size)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("maxRowsPerTrigger", "0"),
        ("maxRowsPerTrigger", "9" * 20),
        ("maxRowsPerTrigger", "9" * 5000),
        ("maxRowsPerTrigger", "\u00b2"),
        ("startingOffsets", '{"0": 9223372036854775808}'),
        ("startingOffsets", '{"0": true}'),
        ("startingOffsets", '{"0": 1.5}'),
        ("startingOffsets", '{"0": null}'),
        ("startingOffsets", '{"4294967296": 0}'),
        ("startingOffsets", '{"0": 1e400}'),
    ],
)
def test_numbers_of_options(option: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{option} cannot be"):
        ReadOptions.parse({"topic": "orders", option: text}, streaming=True)
