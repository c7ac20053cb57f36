"""Dead letters over HTTP: listed, redriven, discarded, and replayed from their topic once."""

from __future__ import annotations

import json

import pytest
from tests.conftest import Clock
from tests.http.conftest import Http
from tests.http.steps import error, make, payloads, publish, received

pytestmark = [pytest.mark.core, pytest.mark.req("G17")]

GROUP = "/topics/orders/groups/stock"


def kill(door: Http, *payloads_: object, error: str = "refused", **rest: object) -> None:
    """Publishes messages, and rejects them."""
    publish(door, *payloads_, **rest)
    messages = received(door, group="stock", max=100)
    body = {"messages": [{"receipt": one["receipt"]} for one in messages], "requeue": False, "error": error}
    assert len(door.post("/messages/nack", body).json["dead"]) == len(payloads_)


def test_dead_letters_are_listed_with_everything_about_them(http_: Http) -> None:
    make(http_, group="stock")
    kill(http_, {"n": 1.50}, key="k", headers={"h": "1"}, error="no such SKU")
    (letter,) = http_.get(f"{GROUP}/dead").json
    assert letter == {
        "topic": "orders",
        "partition": 0,
        "offset": 0,
        "key": "k",
        "payload": {"n": 1.5},
        "headers": {"h": "1"},
        "attempt": 1,
        "attempts": 1,
        "published_at": "2030-01-01T00:00:00+00:00",
        "priority": None,
        "topic_uid": http_.get("/topics/orders").json["uid"],
        "reason": "rejected",
        "last_error": "no such SKU",
        "last_traceback": None,
        "errors": ["attempt 1: no such SKU"],
        "died_at": "2030-01-01T00:00:00+00:00",
        "held": False,
    }
    assert error(http_.get(f"{GROUP}/dead?limit=0")) == (422, "invalid_argument", "$.limit")


@pytest.mark.req("V8")
def test_redrive_all_or_by_filter_with_a_dry_run(http_: Http, clock: Clock) -> None:
    make(http_, group="stock")
    kill(http_, "a", "b", key="x", error="timeout: 3 s")
    clock.move(60)
    kill(http_, "c", key="y", error="refused")
    dry = http_.post(f"{GROUP}/redrive", {"where_error": "timeout%", "dry_run": True})
    assert dry.json == {
        "count": 2,
        "dry_run": True,
        "messages": [{"partition": 0, "offset": 0}, {"partition": 0, "offset": 1}],
    }
    assert received(http_, group="stock") == []
    for which, count in (
        ({"key": "y"}, 1),
        ({"partition": 0, "offsets": [1]}, 1),
        ({"died_from": "2030-01-01T00:00:30Z"}, 1),
        ({"died_until": "2030-01-01T00:00:30Z"}, 2),
        ({"limit": 1}, 1),
        ({}, 3),
    ):
        found = http_.post(f"{GROUP}/redrive", {**which, "dry_run": True})
        assert found.json["count"] == count, which
    assert http_.post(f"{GROUP}/redrive", {"key": "x", "reason": "mended"}).json["count"] == 2
    again = received(http_, group="stock", max=5)
    assert [(one["payload"], one["attempt"]) for one in again] == [("a", 1), ("b", 1)]
    assert http_("POST", f"{GROUP}/redrive").json["count"] == 1, "without a body, all"
    history = http_.get("/topics/orders/partitions/0/messages/0/history?group=stock").json
    assert [entry["kind"] for entry in history].count("redrive") == 1


def test_discarded_letters_are_gone_for_good(http_: Http) -> None:
    make(http_, group="stock")
    kill(http_, "a", "b")
    assert http_.post(f"{GROUP}/discard", {"partition": 0, "offsets": [0]}).json["count"] == 1
    assert [letter["offset"] for letter in http_.get(f"{GROUP}/dead").json] == [1]


@pytest.mark.req("G20")
@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"where_error": 5}, "$.where_error"),
        ({"where_error": "\0"}, "$.where_error"),
        ({"key": "\0"}, "$.key"),
        ({"partition": 0, "offsets": [2**63]}, "$.offsets[0]"),
        ({"died_from": "yesterday"}, "$.died_from"),
        ({"limit": 0}, "$.limit"),
        ({"dry_run": "yes"}, "$.dry_run"),
        ({"wher_error": "x"}, "$.wher_error"),
    ],
)
def test_a_bad_filter_is_named_and_changes_nothing(http_: Http, body: object, path: str) -> None:
    make(http_, group="stock")
    kill(http_, "a")
    for verb in ("redrive", "discard"):
        assert error(http_.post(f"{GROUP}/{verb}", body)) == (422, "invalid_argument", path)
    assert len(http_.get(f"{GROUP}/dead").json) == 1


@pytest.mark.req("G10")
def test_a_dead_letter_topic_is_listed_counted_consumed_and_replayed_once(http_: Http, clock: Clock) -> None:
    make(http_, group="stock", policy={"dead_letter": "topic", "max_attempts": 2})
    publish(http_, {"sku": 7}, key="k", headers={"own": "1"})
    for text in ("connection timeout", "service unavailable"):
        (message,) = received(http_, group="stock")
        http_.post("/messages/nack", {"receipt": message["receipt"], "error": text})
        clock.move(5)
    assert [topic["name"] for topic in http_.get("/topics").json] == ["orders", "orders-dlq"]
    assert http_.get("/topics/orders-dlq").json["message_count"] == 1
    (copy,) = received(http_, "orders-dlq/0")
    assert (copy["payload"], copy["key"]) == ({"sku": 7}, "k")
    headers = copy["headers"]
    assert {name: headers[f"x-custody-{name}"] for name in ("dlq-reason", "delivery-attempts")} == {
        "dlq-reason": "max_retries_exceeded",
        "delivery-attempts": "2",
    }
    assert [headers[f"x-custody-original-{name}"] for name in ("topic", "partition", "offset")] == ["orders", "0", "0"]
    assert headers["x-custody-first-failure"] < headers["x-custody-last-failure"]
    assert json.loads(headers["x-custody-failure-errors"]) == [
        "attempt 1: connection timeout",
        "attempt 2: service unavailable",
    ]
    body = {"dlq_topic": "orders-dlq", "partition": 0, "offset": 0, "target_topic": "orders"}
    replayed = http_.post("/messages/dlq/replay", body)
    assert replayed.json == {"topic": "orders", "partition": 0, "offset": 1, "duplicate": False, "resolved": True}
    repeat = http_.post("/messages/dlq/replay", body)
    assert (repeat.json["offset"], repeat.json["duplicate"]) == (1, True)
    (again,) = received(http_, group="stock", max=5)
    assert (again["payload"], again["headers"]["own"], again["attempt"]) == ({"sku": 7}, "1", 1)
    assert http_.get(f"{GROUP}/dead").json == [], "the dead case counts as replayed"


@pytest.mark.req("G10", "G20")
def test_what_is_no_dead_letter_is_not_replayed(http_: Http) -> None:
    make(http_)
    publish(http_, 1)
    ask = {"dlq_topic": "orders", "partition": 0, "offset": 0}
    assert error(http_.post("/messages/dlq/replay", ask))[:2] == (422, "invalid_argument")
    assert error(http_.post("/messages/dlq/replay", {**ask, "dlq_topic": "no"})) == (404, "topic_not_found", None)
    assert error(http_.post("/messages/dlq/replay", {**ask, "partition": 9})) == (404, "partition_not_found", None)
    assert error(http_.post("/messages/dlq/replay", {**ask, "offset": 2**63})) == (422, "invalid_argument", "$.offset")
    assert payloads(received(http_, max=5)) == [1]


def test_without_a_dead_letter_topic_the_answer_says_how_to_get_one(http_: Http) -> None:
    make(http_, group="stock")
    kill(http_, 1)
    replay = {"dlq_topic": "orders-dlq", "partition": 0, "offset": 0}
    for answer in (
        http_.post("/messages/dlq/replay", replay),
        http_.get("/topics/orders-dlq"),
        http_.get("/messages/orders-dlq/0"),
        http_.get("/messages/orders-dlq"),
    ):
        assert (answer.status, answer.code) == (404, "topic_not_found")
        assert "no group of 'orders' sends its dead letters to a topic" in answer.json["error"]["message"]
        assert 'dead_letter "topic"' in answer.json["error"]["remedy"]
        assert "redrive" in answer.json["error"]["remedy"]
    other = http_.post("/messages/dlq/replay", {**replay, "dlq_topic": "nothing-dlq"})
    assert (other.code, "dead_letter" in other.json["error"]["remedy"]) == ("topic_not_found", False)
    # the remedy works
    assert http_("PATCH", GROUP, {"policy": {"dead_letter": "topic"}}).status == 200
    kill(http_, 2)
    assert http_.post("/messages/dlq/replay", replay).status == 200
