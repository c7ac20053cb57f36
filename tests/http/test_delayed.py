"""Delayed messages over HTTP: published, listed, cancelled, delivered at their time."""

from __future__ import annotations

import pytest
from tests.conftest import Clock
from tests.http.conftest import Http
from tests.http.steps import error, make, payloads, publish, received

pytestmark = [pytest.mark.core, pytest.mark.req("G15")]


@pytest.mark.parametrize("when", [{"delay": "10s"}, {"delay": 10}, {"deliver_at": "2030-01-01T00:00:10Z"}])
def test_a_delayed_message_has_an_id_in_place_of_an_offset_and_comes_at_its_time(
    http_: Http, clock: Clock, when: dict[str, object]
) -> None:
    make(http_)
    placed = http_.post("/messages", {"topic": "orders", "payload": "later", **when})
    assert placed.status == 200
    assert placed.json == {
        "topic": "orders",
        "partition": 0,
        "delay_id": placed.json["delay_id"],
        "deliver_at": "2030-01-01T00:00:10Z",
        "duplicate": False,
    }
    publish(http_, "now")
    clock.move(9.999)
    assert payloads(received(http_, max=5)) == ["now"]
    clock.move(0.001)
    assert payloads(received(http_, max=5)) == ["later"]
    assert http_.get("/topics/orders/delayed").json == []


def test_delayed_messages_are_listed_the_next_one_first(http_: Http) -> None:
    make(http_, partitions=2)
    publish(http_, {"n": 1.0}, key="a", headers={"h": "1"}, delay="2h")
    http_.post("/messages", {"topic": "orders", "payload_base64": "AP8=", "key": "b", "delay": "1h"})
    first, second = http_.get("/topics/orders/delayed").json
    assert (first["key"], first["payload_base64"], first["deliver_at"]) == ("b", "AP8=", "2030-01-01T01:00:00+00:00")
    assert sorted(second) == [
        "delay_id",
        "delayed_at",
        "deliver_at",
        "duplicate",
        "headers",
        "key",
        "partition",
        "payload",
        "topic",
    ]
    assert (second["payload"], second["headers"]) == ({"n": 1.0}, {"h": "1"})
    assert [one["key"] for one in http_.get("/topics/orders/delayed?key=a").json] == ["a"]
    assert len(http_.get("/topics/orders/delayed?limit=1").json) == 1
    assert http_.get("/topics/orders").json["message_count"] == 0


def test_a_delayed_message_can_be_taken_back_until_it_is_due(http_: Http, clock: Clock) -> None:
    make(http_)
    first, second = publish(http_, 1, 2, delay="1m")
    assert http_("DELETE", f"/topics/orders/delayed/{first['delay_id']}").status == 204
    clock.move(60)
    assert payloads(received(http_, max=5)) == [2]
    for delay_id in (first["delay_id"], second["delay_id"], 0):
        assert error(http_("DELETE", f"/topics/orders/delayed/{delay_id}")) == (404, "delay_not_found", None)
    assert error(http_("DELETE", "/topics/nothing/delayed/1")) == (404, "topic_not_found", None)
    assert error(http_("DELETE", "/topics/orders/delayed/x")) == (422, "invalid_argument", "delay_id")
    assert error(http_("DELETE", f"/topics/orders/delayed/{2**63}")) == (422, "invalid_argument", "delay_id")


def test_a_batch_may_have_both_kinds(http_: Http) -> None:
    make(http_)
    body = {"topic": "orders", "messages": [{"payload": 1}, {"payload": 2, "delay": "1h"}, {"payload": 3}]}
    placed = http_.post("/messages", body).json["receipts"]
    assert [one.get("offset") for one in placed] == [0, None, 1]
    assert "delay_id" in placed[1]


def test_a_delay_and_a_time_do_not_go_together(http_: Http) -> None:
    make(http_)
    both = {"topic": "orders", "payload": 1, "delay": 1, "deliver_at": "2030-01-02T00:00:00Z"}
    assert error(http_.post("/messages", both)) == (422, "invalid_argument", "$.deliver_at")
    expecting = {"topic": "orders", "payload": 1, "delay": 1, "expected_offset": 0}
    assert error(http_.post("/messages", expecting))[:2] == (422, "invalid_argument")
