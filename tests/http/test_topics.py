"""Topics over HTTP."""

from __future__ import annotations

import pytest
from tests.conftest import Clock
from tests.http.conftest import Http
from tests.http.steps import error, make, publish, received

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("G2")]


def test_a_topic_is_made_once(http_: Http) -> None:
    made = http_.post("/topics", {"name": "orders", "partitions": 4})
    assert (made.status, made.json["name"], made.json["partitions"]) == (201, "orders", 4)
    assert error(http_.post("/topics", {"name": "orders"})) == (409, "topic_exists", None)


def test_topics_are_listed_as_a_bare_array(http_: Http) -> None:
    assert http_.get("/topics").json == []
    make(http_, "orders-dlq")
    make(http_)
    found = http_.get("/topics")
    assert (found.status, [topic["name"] for topic in found.json]) == (200, ["orders", "orders-dlq"])


def test_a_topic_tells_its_offsets_and_counts_its_messages(http_: Http) -> None:
    make(http_, partitions=2)
    publish(http_, 1, 2, 3, partition=1)
    found = http_.get("/topics/orders")
    assert found.json == {
        "name": "orders",
        "uid": http_.get("/topics").json[0]["uid"],
        "partitions": 2,
        "message_count": 3,
        "first_offsets": [0, 0],
        "tails": [0, 3],
        "max_depth": None,
        "priorities": False,
        "starvation_limit": None,
        "retention": None,
        "created_at": "2030-01-01T00:00:00+00:00",
    }


def test_a_topic_goes_with_everything_in_it(http_: Http) -> None:
    make(http_, group="stock")
    publish(http_, 1)
    gone = http_("DELETE", "/topics/orders")
    assert (gone.status, gone.body) == (204, b"")
    assert not {"content-type", "content-length"} & set(gone.headers)
    for answer in (
        http_("DELETE", "/topics/orders"),
        http_.get("/topics/orders"),
        http_.get("/topics/orders/groups"),
        http_.get("/messages/orders"),
        http_.post("/messages", {"topic": "orders", "payload": 1}),
    ):
        assert error(answer) == (404, "topic_not_found", None)


def test_what_a_topic_keeps_is_set_and_changed(http_: Http) -> None:
    made = http_.post("/topics", {"name": "orders", "retention": {"time": "7d", "size": "10GB"}})
    assert made.json["retention"]["time"] == 7 * 86400
    assert made.json["retention"]["size"] == 10 * 2**30
    changed = http_("PATCH", "/topics/orders", {"retention": {"time": 60}, "partitions": 3})
    assert (changed.status, changed.json["retention"]["time"], changed.json["partitions"]) == (200, 60, 3)
    assert http_("PATCH", "/topics/orders", {"retention": None}).json["retention"] is None
    assert error(http_("PATCH", "/topics/orders", {}))[:2] == (422, "invalid_argument")
    assert error(http_("PATCH", "/topics/orders", {"partitions": 2})) == (409, "conflict", None)


def test_segments_upkeep_and_the_journal(http_: Http, clock: Clock) -> None:
    make(http_, retention={"time": "1h"})
    publish(http_, 1)
    clock.move(3600)
    did = http_.post("/maintain", {"topic": "orders"})
    assert (did.status, did.json[0]["did"]) == (200, "sealed")
    assert [segment["messages"] for segment in http_.get("/topics/orders/segments").json] == [1, 0]
    assert http_.get("/topics/orders/kept").json == {"events": 0, "bytes": 0}
    assert http_("PATCH", "/journal", {"time": "90d", "size": "1GB"}).json["keep_time"] == 90 * 86400
    assert http_.get("/journal").json["keep_size"] == 2**30


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"name": "a b"}, "$.name"),
        ({"name": "a/b"}, "$.name"),
        ({"name": "é"}, "$.name"),
        ({"name": "a\0"}, "$.name"),
        ({"name": ""}, "$.name"),
        ({"name": "x" * 201}, "$.name"),
        ({"name": 5}, "$.name"),
        ({}, "$.name"),
        ({"name": "t", "partitons": 2}, "$.partitons"),
        ({"name": "t", "partitions": 0}, "$.partitions"),
        ({"name": "t", "partitions": 4097}, "$.partitions"),
        ({"name": "t", "partitions": 2**80}, "$.partitions"),
        ({"name": "t", "partitions": True}, "$.partitions"),
        ({"name": "t", "max_depth": 2**63}, "$.max_depth"),
        ({"name": "t", "priorities": 1}, "$.priorities"),
        ({"name": "t", "starvation_limit": "soon"}, "$.starvation_limit"),
        ({"name": "t", "retention": {"time": 0}}, "$.retention.time"),
        ({"name": "t", "retention": {"size": "9" * 400}}, "$.retention.size"),
        ({"name": "t", "retention": {"size": []}}, "$.retention.size"),
        ({"name": "t", "retention": {"size": True}}, "$.retention.size"),
        ({"name": "t", "retention": {"sizes": 1}}, "$.retention.sizes"),
    ],
)
@pytest.mark.req("G20")
def test_a_bad_field_is_named(http_: Http, body: dict[str, object], path: str) -> None:
    assert error(http_.post("/topics", body)) == (422, "invalid_argument", path)
    assert http_.get("/topics").json == []


@pytest.mark.req("C6", "G20")
def test_a_full_topic_refuses_with_the_time_to_try_again(http_: Http) -> None:
    make(http_, group="default", max_depth=2)
    publish(http_, 1, 2)
    full = http_.post("/messages", {"topic": "orders", "payload": 3})
    assert error(full) == (429, "queue_full", None)
    assert int(full.headers["retry-after"]) >= 1
    lease = http_.get("/messages/orders").json
    assert http_.post("/messages/ack", {"lease_id": lease["lease_id"]}).status == 200
    assert http_.post("/messages", {"topic": "orders", "payload": 3}).status == 200


@pytest.mark.req("G13")
def test_what_is_in_flight(http_: Http, clock: Clock) -> None:
    make(http_, partitions=2)
    publish(http_, 1, 2, 3, partition=0)
    publish(http_, 4, partition=1)
    clock.move(1)
    assert len(received(http_, "orders/0", max=3)) == 3
    clock.move(10)
    assert len(received(http_, "orders/1")) == 1
    clock.move(15)
    assert http_.get("/topics/orders/inflight").json == {
        "topic": "orders",
        "partitions": {
            "0": {"in_flight_count": 3, "oldest_in_flight_age_seconds": 25.0},
            "1": {"in_flight_count": 1, "oldest_in_flight_age_seconds": 15.0},
        },
    }
    clock.move(10)
    assert http_.get("/topics/orders/inflight?group=default").json["partitions"] == {
        "0": {"in_flight_count": 0, "oldest_in_flight_age_seconds": None},
        "1": {"in_flight_count": 1, "oldest_in_flight_age_seconds": 25.0},
    }
    assert error(http_.get("/topics/orders/inflight?group=nobody")) == (404, "group_not_found", None)
    assert error(http_.get("/topics/nothing/inflight")) == (404, "topic_not_found", None)


def test_partitions_can_be_added_and_are_used(http_: Http, c: custody.Custody) -> None:
    make(http_)
    assert http_("PATCH", "/topics/orders", {"partitions": 2}).status == 200
    assert publish(http_, "there", partition=1)[0]["partition"] == 1
    assert c.topic("orders").partitions == 2
