"""Receiving over HTTP: leases, long polls, at most once, redeliveries."""

from __future__ import annotations

import asyncio
import threading
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from tests.conftest import Clock
from tests.http.conftest import Http, Response
from tests.http.steps import error, make, payloads, publish, receive, received
from tests.waiting import wait_for

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("G4")]


def test_a_lease_has_an_id_a_deadline_and_messages_with_receipts(http_: Http) -> None:
    make(http_, partitions=2)
    publish(http_, "a", "b", key="k", headers={"h": "1"}, partition=1, allow_split=True)
    lease = http_.get("/messages/orders/1?max=5").json
    UUID(lease["lease_id"])
    assert lease["deadline"] == "2030-01-01T00:00:30Z"
    assert [sorted(message) for message in lease["messages"]] == [
        ["attempt", "headers", "key", "offset", "partition", "payload", "published_at", "receipt", "topic", "topic_uid"]
    ] * 2
    assert lease["messages"][1] == {
        "topic": "orders",
        "partition": 1,
        "offset": 1,
        "key": "k",
        "payload": "b",
        "headers": {"h": "1"},
        "attempt": 1,
        "published_at": "2030-01-01T00:00:00Z",
        "topic_uid": http_.get("/topics/orders").json["uid"],
        "receipt": f"{lease['lease_id']}:1",
    }


def test_without_a_number_a_request_gets_one_message(http_: Http) -> None:
    make(http_)
    publish(http_, 1, 2)
    assert payloads(received(http_)) == [1]


def test_without_a_partition_one_with_work_is_found(http_: Http) -> None:
    make(http_, partitions=8)
    publish(http_, "there", partition=6)
    assert http_.get("/messages/orders/3").json["messages"] == []
    assert payloads(received(http_)) == ["there"]


def test_an_empty_answer_says_why(http_: Http) -> None:
    make(http_)
    assert http_.get("/messages/orders").json == {
        "lease_id": None,
        "deadline": None,
        "messages": [],
        "reason": "empty",
        "detail": None,
    }


@pytest.mark.req("G7")
@pytest.mark.parametrize(("given", "seconds"), [("60s", 60), ("60", 60), ("1m", 60), ("1.5", 1.5), ("250ms", 0.25)])
def test_a_visibility_timeout_is_a_duration_or_seconds(http_: Http, clock: Clock, given: str, seconds: float) -> None:
    make(http_)
    publish(http_, 1)
    assert len(received(http_, visibility_timeout=given)) == 1
    clock.move(seconds - 0.001)
    assert received(http_) == []
    clock.move(0.001)
    assert [message["attempt"] for message in received(http_)] == [2]


@pytest.mark.req("G7")
def test_the_visibility_timeout_of_the_group_is_the_default(http_: Http) -> None:
    make(http_, group="slow", policy={"visibility_timeout": "2m"})
    publish(http_, 1)
    assert receive(http_, group="slow").json["deadline"] == "2030-01-01T00:02:00Z"


@pytest.mark.req("G9")
def test_a_redelivery_carries_its_history_in_headers(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 1, headers={"own": "kept"})
    (first,) = received(http_)
    assert first["headers"] == {"own": "kept"}
    http_.post("/messages/nack", {"receipt": first["receipt"], "error": "timeout processing order"})
    clock.move(1)
    (second,) = received(http_)
    assert (second["attempt"], second["headers"]) == (
        2,
        {
            "own": "kept",
            "x-custody-delivery-count": "2",
            "x-custody-first-delivery": "2030-01-01T00:00:00+00:00",
            "x-custody-last-error": "timeout processing order",
        },
    )


@pytest.mark.req("G1")
def test_at_most_once_is_done_when_it_is_sent(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 1, 2)
    assert payloads(received(http_, auto_ack="true")) == [1]
    clock.move(3600)
    assert payloads(received(http_, auto_ack="true", max=5)) == [2]
    clock.move(3600)
    assert received(http_) == []
    stats = http_.get("/topics/orders/groups/default/stats").json
    assert (stats["depth"], stats["in_flight"]) == (0, 0)


@pytest.mark.req("G1", "V5")
def test_at_least_once_comes_again_until_it_is_acknowledged(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 1)
    assert payloads(received(http_)) == [1]
    clock.move(30)
    (again,) = received(http_)
    assert http_.post("/messages/ack", {"receipt": again["receipt"]}).status == 200
    clock.move(30)
    assert received(http_) == []


def test_a_long_poll_ends_when_a_message_comes(http_: Http, c: custody.Custody) -> None:
    make(http_)
    answers: list[Response] = []
    poll = threading.Thread(target=lambda: answers.append(receive(http_, wait="20s")))
    poll.start()
    wait_for(lambda: c.groups("orders"), "the poll has come")
    publish(http_, "at last")
    poll.join(10)
    assert payloads(answers[0].json["messages"]) == ["at last"]


def test_a_long_poll_ends_empty_after_its_time(http_: Http) -> None:
    make(http_)
    for wait in ("50ms", "0.05", "0"):
        assert received(http_, wait=wait) == []


def test_a_wait_is_cut_to_what_the_server_allows(c: custody.Custody, serve: object) -> None:
    door: Http = serve(max_wait="20ms")  # type: ignore[operator]
    make(door)
    assert received(door, wait="1h") == []


@pytest.mark.req("G20")
def test_what_was_claimed_for_a_client_that_has_gone_is_given_back(
    c: custody.Custody, http_: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(http_, group="stock", policy={"max_attempts": 1})
    publish(http_, 1)
    claiming, go_on = threading.Event(), threading.Event()
    real = http_.state.claim

    async def claim(place: Any, callers: Any) -> Any:
        claiming.set()
        await asyncio.to_thread(go_on.wait, 20)
        return await real(place, callers)

    monkeypatch.setattr(http_.state, "claim", claim)
    connection = HTTPConnection(urlsplit(http_.url).netloc)
    connection.request("GET", "/messages/orders?group=stock")
    assert claiming.wait(20)
    connection.close()
    assert http_.get("/healthz").status == 200  # by now the server has seen it
    go_on.set()
    wait_for(lambda: "release" in [one.kind for one in c.trace("orders", 0, 0)], "it was given back")
    (again,) = received(http_, group="stock")
    assert (again["payload"], again["attempt"]) == (1, 1)


@pytest.mark.parametrize(
    ("query", "path"),
    [
        ("max=0", "$.max"),
        ("max=10001", "$.max"),
        ("max=many", "$.max"),
        ("max=99999999999999999999", "$.max"),
        ("max=", "$.max"),
        ("max=1&max=2", "$.max"),
        ("visibility_timeout=0", "$.visibility_timeout"),
        ("visibility_timeout=-1", "$.visibility_timeout"),
        ("visibility_timeout=soon", "$.visibility_timeout"),
        ("visibility_timeout=1e400", "$.visibility_timeout"),
        ("wait=nan", "$.wait"),
        ("wait=", "$.wait"),
        ("auto_ack=maybe", "$.auto_ack"),
        ("group=", "$.group"),
        ("group=%00", "$.group"),
        (f"group={'x' * 201}", "$.group"),
        ("limit=5", "$.limit"),
    ],
)
def test_a_bad_parameter_is_named(http_: Http, query: str, path: str) -> None:
    make(http_)
    publish(http_, 1)
    assert error(http_.get(f"/messages/orders?{query}")) == (422, "invalid_argument", path)
    assert payloads(received(http_)) == [1], "nothing was leased"


@pytest.mark.req("G20")
@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/messages/nothing", (404, "topic_not_found", None)),
        ("/messages/a%20b", (404, "topic_not_found", None)),
        ("/messages/%E2%82%AC", (404, "topic_not_found", None)),
        ("/messages/%ff", (404, "topic_not_found", None)),
        ("/messages/" + "x" * 5000, (404, "topic_not_found", None)),
        ("/messages/%00", (422, "invalid_argument", "topic")),
        ("/messages/orders/7", (404, "partition_not_found", None)),
        ("/messages/orders/-1", (422, "invalid_argument", "partition")),
        ("/messages/orders/one", (422, "invalid_argument", "partition")),
        ("/messages/orders/0x1", (422, "invalid_argument", "partition")),
        ("/messages/orders/%D9%A1", (422, "invalid_argument", "partition")),
        ("/messages/orders/2147483648", (422, "invalid_argument", "partition")),
        ("/messages/orders/" + "9" * 5000, (422, "invalid_argument", "partition")),
        ("/messages/orders/0/1", (404, "no_such_path", None)),
        ("/messages/orders/", (404, "no_such_path", None)),
        ("/messages//0", (404, "no_such_path", None)),
    ],
)
def test_an_odd_path_is_refused(http_: Http, path: str, found: tuple[int, str, str | None]) -> None:
    make(http_)
    assert error(http_.get(path)) == found


@pytest.mark.parametrize("whole", [True, False], ids=["lease", "receipt"])
def test_a_receive_can_ack_what_was_received_before(http_: Http, whole: bool) -> None:
    make(http_)
    publish(http_, 1, 2, 3)
    first = receive(http_, max=2).json
    assert "settled" not in first
    assert "lost" not in first
    ack = first["lease_id"] if whole else first["messages"][1]["receipt"]
    second = receive(http_, ack=ack, max=1).json
    assert second["settled"] == {"settled": 2 if whole else 1, "dead": [], "released": []}
    assert payloads(second["messages"]) == [3]
    empty = receive(http_, ack=ack).json  # a repeat
    assert empty["settled"]["already"] is True
    assert (empty["lease_id"], empty["reason"]) == (None, "empty")
    assert http_.get("/topics/orders/inflight").json["partitions"]["0"]["in_flight_count"] == (1 if whole else 2)


def test_what_an_earlier_lease_has_lost_is_named_beside_the_new_messages(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 1)
    first = receive(http_, visibility_timeout="5s").json
    clock.move(5)
    second = receive(http_, ack=first["lease_id"]).json
    assert (second["lost"], "settled" in second) == ([0], False)
    assert [message["attempt"] for message in second["messages"]] == [2]
    receipt = f"{first['lease_id']}:7"
    assert receive(http_, ack=receipt).json["lost"] == [7]


def test_an_ack_is_done_also_if_the_group_hands_out_nothing(c: custody.Custody, http_: Http) -> None:
    make(http_)
    publish(http_, 1, 2)
    first = receive(http_).json
    c.pause("orders", "default", reason="a bad deploy")
    answer = receive(http_, ack=first["lease_id"])
    assert (answer.status, answer.json["settled"]["settled"]) == (200, 1)
    assert (answer.json["reason"], answer.json["detail"]) == ("paused", "a bad deploy")
    assert error(receive(http_))[:2] == (503, "paused")


def test_an_ack_that_is_refused_receives_nothing(http_: Http) -> None:
    make(http_, group="g", policy={"ordering": "key"})
    publish(http_, 1, 2, key="k")
    publish(http_, 3, key="other")
    first = receive(http_, group="g", max=2).json
    assert error(receive(http_, group="g", ack=first["messages"][1]["receipt"]))[:2] == (409, "order_conflict")
    for wrong in ("x", "x:1", f"{first['lease_id']}:x", f"{first['lease_id']}:-1", ""):
        assert error(receive(http_, group="g", ack=wrong)) == (422, "invalid_argument", "$.ack")
    assert http_.get("/topics/orders/inflight").json["partitions"]["0"]["in_flight_count"] == 2


def test_an_ack_with_a_receive_is_counted_once(http_: Http) -> None:
    make(http_)
    publish(http_, 1, 2)
    first = receive(http_, max=2).json
    for _ in range(2):
        receive(http_, ack=first["lease_id"])
    acked = 'custody_messages_settled_total{group="default",outcome="ack",topic="orders"} 2.0'
    assert acked in http_.get("/metrics").body.decode()
