"""Idempotent producers over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from tests.http.conftest import Http
from tests.http.steps import error, make, payloads, received

pytestmark = [pytest.mark.core, pytest.mark.req("G11")]


def init(door: Http, producer: str = "order-service-1") -> dict[str, Any]:
    """What every publish of the producer has to say of it."""
    made = door.post("/producers/init", {"producer_id": producer, "idempotent": True})
    assert made.status == 200
    return {"producer_id": producer, "epoch": made.json["epoch"]}


def send(door: Http, who: dict[str, Any], sequence: int, payload: object = "order data", **rest: Any) -> Any:
    return door.post("/messages", {"topic": "orders", **who, "sequence": sequence, "payload": payload, **rest})


def test_each_init_is_a_new_epoch(http_: Http) -> None:
    first = http_.post("/producers/init", {"producer_id": "order-service-1", "idempotent": True}).json
    assert first == {"producer_id": "order-service-1", "epoch": 1, "last_sequence": -1, "last_receipt": None}
    assert http_.post("/producers/init", {"producer_id": "order-service-1"}).json["epoch"] == 2


@pytest.mark.req("G1")
def test_the_same_again_returns_the_first_offset_and_adds_nothing(http_: Http) -> None:
    make(http_)
    who = init(http_)
    assert send(http_, who, 0).json == {"topic": "orders", "partition": 0, "offset": 0, "duplicate": False}
    assert send(http_, who, 1, "another").json["offset"] == 1
    assert send(http_, who, 0).json == {"topic": "orders", "partition": 0, "offset": 0, "duplicate": True}
    assert payloads(received(http_, max=5)) == ["order data", "another"]


def test_a_batch_carries_its_first_sequence_over_all_topics(http_: Http) -> None:
    make(http_)
    make(http_, "stock")
    who = init(http_)
    batch = {"messages": [{"topic": "orders", "payload": 0}, {"topic": "stock", "payload": 1}], **who, "sequence": 0}
    first = http_.post("/messages", batch).json["receipts"]
    again = http_.post("/messages", batch).json["receipts"]
    assert [one["duplicate"] for one in again] == [True, True]
    assert [(one["topic"], one["offset"]) for one in again] == [(one["topic"], one["offset"]) for one in first]
    assert error(send(http_, who, 1)) == (409, "sequence_conflict", None), "that number is of another topic"
    assert send(http_, who, 2).json["duplicate"] is False


def test_a_large_batch_is_idempotent_too(http_: Http) -> None:
    make(http_)
    who = init(http_)
    batch = {"topic": "orders", "messages": [{"payload": n} for n in range(300)], **who, "sequence": 0}
    assert {one["duplicate"] for one in http_.post("/messages", batch).json["receipts"]} == {False}
    assert {one["duplicate"] for one in http_.post("/messages", batch).json["receipts"]} == {True}
    assert http_.get("/topics/orders").json["message_count"] == 300


def test_a_gap_is_a_conflict(http_: Http) -> None:
    make(http_)
    who = init(http_)
    assert error(send(http_, who, 1)) == (409, "sequence_conflict", None)
    assert http_.get("/topics/orders").json["message_count"] == 0


def test_the_last_thousand_are_remembered_and_older_ones_refused(http_: Http) -> None:
    make(http_)
    who = init(http_)
    for first in (0, 500, 1000, 1500):
        batch = {"topic": "orders", "messages": [{"payload": n} for n in range(500)], **who, "sequence": first}
        assert http_.post("/messages", batch).status == 200
    assert send(http_, who, 1000, 0).json["duplicate"] is True
    assert error(send(http_, who, 0, 0)) == (409, "sequence_conflict", None)
    assert http_.get("/topics/orders").json["message_count"] == 2000


def test_an_older_epoch_is_fenced(http_: Http) -> None:
    make(http_)
    old = init(http_)
    new = init(http_)
    assert error(send(http_, old, 0)) == (409, "producer_fenced", None)
    assert send(http_, new, 0).status == 200


@pytest.mark.req("C8")
def test_after_an_unknown_publish_the_producer_tells_where_it_stands(http_: Http) -> None:
    make(http_)
    for producer in ("order-service-1", "orders/é 1"):
        who = init(http_, producer)
        placed = send(http_, who, 0).json
        path = "/producers/order-service-1" if "/" not in producer else "/producers/orders%2F%C3%A9%201"
        assert http_.get(path).json == {**who, "last_sequence": 0, "last_receipt": placed}
    assert error(http_.get("/producers/nobody")) == (404, "producer_not_found", None)
    assert error(http_.get("/producers/%00")) == (422, "invalid_argument", "producer_id")


@pytest.mark.req("G20")
@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        ("/producers/init", {}, (422, "invalid_argument", "$.producer_id")),
        ("/producers/init", {"producer_id": ""}, (422, "invalid_argument", "$.producer_id")),
        ("/producers/init", {"producer_id": "a\0"}, (422, "invalid_argument", "$.producer_id")),
        ("/producers/init", {"producer_id": "x" * 201}, (422, "invalid_argument", "$.producer_id")),
        ("/producers/init", {"producer_id": "p", "idempotent": False}, (422, "invalid_argument", "$.idempotent")),
        ("/messages", {"producer_id": "p"}, (422, "invalid_argument", None)),
        ("/messages", {"producer_id": "p", "epoch": 1}, (422, "invalid_argument", None)),
        ("/messages", {"sequence": 0}, (422, "invalid_argument", None)),
        ("/messages", {"producer_id": "p", "epoch": 0, "sequence": 0}, (422, "invalid_argument", "$.epoch")),
        ("/messages", {"producer_id": "p", "epoch": 2**31, "sequence": 0}, (422, "invalid_argument", "$.epoch")),
        ("/messages", {"producer_id": "p", "epoch": 1, "sequence": -1}, (422, "invalid_argument", "$.sequence")),
        ("/messages", {"producer_id": "p", "epoch": 1, "sequence": 2**63}, (422, "invalid_argument", "$.sequence")),
        ("/messages", {"producer_id": "p", "epoch": 1, "sequence": 0}, (404, "producer_not_found", None)),
    ],
)
def test_a_bad_field_is_named(http_: Http, path: str, body: dict[str, object], found: object) -> None:
    make(http_)
    more = {"topic": "orders", "payload": 1} if path == "/messages" else {}
    assert error(http_.post(path, {**more, **body})) == found
