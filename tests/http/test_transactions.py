"""Transactions over HTTP: everything is seen at once, or nothing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import psycopg
import pytest
from tests.conftest import Clock
from tests.http.conftest import Http, Response
from tests.http.steps import error, make, payloads, publish, receive, received
from tests.waiting import wait_for

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("G12")]


def test_commits_to_a_topic_that_somebody_holds_stop_nobody_else(
    c: custody.Custody, http_: Http, database_url: str, db: psycopg.Connection
) -> None:
    make(http_)
    make(http_, "other")
    secret = c.create_api_key("shop", admin=["*"]).secret
    own = {"Authorization": f"Bearer {secret}"}
    publish_other = {"topic": "other", "messages": [{"payload": 1}, {"payload": 2}, {"payload": 3}]}
    assert http_.post("/messages", publish_other, headers=own).status == 200
    http_.post("/producers/init", {"producer_id": "p"}, headers=own)
    asked = []
    for number in range(12):
        if number % 2:
            event = {"event_id": str(uuid4()), "payload": 1}
            asked.append(("/topics/orders/events", {"events": [event]}))
            continue
        begun = http_.post("/transactions/begin", {"producer_id": "p"}, headers=own).json["transaction_id"]
        http_.post("/messages", {"transaction_id": begun, "topic": "orders", "payload": 1}, headers=own)
        asked.append(("/transactions/commit", {"transaction_id": begun}))
    with psycopg.connect(database_url) as holder, ThreadPoolExecutor(12) as clients:
        holder.execute(
            "SELECT FROM custody.heads h JOIN custody.topics t USING (topic_id) WHERE t.name = 'orders' FOR UPDATE OF h"
        )
        held = [clients.submit(http_.post, *one, headers=own) for one in asked]
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_for(lambda: len(db.execute(waiting).fetchall()) > 1, "they wait for the topic")
        try:
            assert http_.post("/messages", publish_other, headers=own, timeout=5).status == 200
            lease = http_.get("/messages/other?max=2", headers=own, timeout=5).json
            receipts = [{"receipt": message["receipt"]} for message in lease["messages"]]
            assert http_.post("/messages/ack", receipts[0], headers=own, timeout=5).status == 200
            assert http_.post("/messages/nack", receipts[1], headers=own, timeout=5).status == 200
            new = c.create_api_key("new", admin=["*"]).secret
            wait_for(
                lambda: http_.get("/topics", headers={"Authorization": f"Bearer {new}"}, timeout=5).status == 200,
                "keys are read",
            )
        finally:
            holder.rollback()
        assert [one.result().status for one in held] == [200] * 12


def test_what_is_sent_again_while_it_waits_takes_no_place_of_others(
    http_: Http, database_url: str, db: psycopg.Connection
) -> None:
    make(http_)
    make(http_, "other")
    http_.post("/producers/init", {"producer_id": "p"})
    to_orders, to_other = (
        http_.post("/transactions/begin", {"producer_id": "p"}).json["transaction_id"] for _ in range(2)
    )
    for transaction, topic in ((to_orders, "orders"), (to_other, "other")):
        http_.post("/messages", {"transaction_id": transaction, "topic": topic, "payload": 1})
    publish(http_, 1, 2)
    lease = http_.get("/messages/orders?max=1").json["lease_id"]
    free = http_.get("/messages/orders?max=1").json["lease_id"]
    commit, extend = "/transactions/commit", "/messages/extend-visibility"
    with psycopg.connect(database_url) as holder, ThreadPoolExecutor(12) as clients:
        holder.execute(
            "SELECT FROM custody.heads h JOIN custody.topics t USING (topic_id) WHERE t.name = 'orders' FOR UPDATE OF h"
        )
        holder.execute("SELECT FROM custody.leases WHERE lease_id = %s FOR UPDATE", [lease])
        held = [clients.submit(http_.post, commit, {"transaction_id": to_orders}) for _ in range(4)]
        held += [clients.submit(http_.post, extend, {"lease_id": lease, "timeout_seconds": 60}) for _ in range(6)]
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_for(lambda: len(db.execute(waiting).fetchall()) == 2, "one of each waits")
        try:
            assert http_.post(commit, {"transaction_id": to_other}, timeout=5).status == 200
            assert http_.post(extend, {"lease_id": free, "timeout_seconds": 60}, timeout=5).status == 200
        finally:
            holder.rollback()
        assert [one.result().status for one in held] == [200] * 10


def begin(door: Http, **rest: object) -> str:
    assert door.post("/producers/init", {"producer_id": "order-service-1"}).status == 200
    begun = door.post("/transactions/begin", {"producer_id": "order-service-1", **rest})
    assert begun.status == 200
    return str(begun.json["transaction_id"])


def add(door: Http, transaction: str, *messages: dict[str, object], **rest: object) -> Response:
    return door.post("/messages", {"transaction_id": transaction, "messages": list(messages), **rest})


ORDER = {"topic": "orders", "payload": "order1"}
STOCK = {"topic": "inventory", "payload": "reserve1"}


def seen(door: Http) -> list[object]:
    return [
        message["payload"]
        for topic in ("orders", "inventory")
        for message in door.get(f"/topics/{topic}/partitions/0/messages").json
    ]


@pytest.fixture
def door(http_: Http) -> Http:
    make(http_)
    make(http_, "inventory")
    return http_


@pytest.mark.req("G1")
def test_nobody_sees_anything_before_the_commit_and_then_all(door: Http) -> None:
    transaction = begin(door)
    added = add(door, transaction, ORDER, STOCK)
    assert (added.status, added.json) == (202, {"transaction_id": transaction, "messages": 2})
    one = door.post("/messages", {"transaction_id": transaction, "topic": "orders", "payload": "order2"})
    assert (one.status, one.json["messages"]) == (202, 3)
    assert seen(door) == []
    done = door.post("/transactions/commit", {"transaction_id": transaction})
    assert done.status == 200
    assert done.json["transaction_id"] == transaction
    assert [(one["topic"], one["offset"], one["duplicate"]) for one in done.json["receipts"]] == [
        ("orders", 0, False),
        ("inventory", 0, False),
        ("orders", 1, False),
    ]
    assert seen(door) == ["order1", "order2", "reserve1"]
    assert payloads(received(door, max=5)) == ["order1", "order2"]


def test_a_repeated_commit_returns_the_same_receipts(door: Http) -> None:
    transaction = begin(door)
    add(door, transaction, ORDER)
    first = door.post("/transactions/commit", {"transaction_id": transaction})
    assert door.post("/transactions/commit", {"transaction_id": transaction}).json == first.json
    assert seen(door) == ["order1"]


def test_a_repeated_add_with_its_number_adds_nothing(door: Http) -> None:
    transaction = begin(door)
    assert add(door, transaction, ORDER, first=0).json["messages"] == 1
    assert add(door, transaction, ORDER, first=0).json["messages"] == 1
    assert add(door, transaction, STOCK, first=1).json["messages"] == 2
    door.post("/transactions/commit", {"transaction_id": transaction})
    assert seen(door) == ["order1", "reserve1"]


def test_an_abort_shows_nothing(door: Http) -> None:
    transaction = begin(door)
    add(door, transaction, ORDER, STOCK)
    body = {"transaction_id": transaction, "reason": "out of stock"}
    assert door.post("/transactions/abort", body).json == {"transaction_id": transaction, "aborted": True}
    assert door.post("/transactions/abort", body).json["aborted"] is False
    assert error(door.post("/transactions/commit", {"transaction_id": transaction})) == (409, "transaction_over", None)
    assert error(add(door, transaction, ORDER)) == (409, "transaction_over", None)
    assert seen(door) == []


@pytest.mark.parametrize("timeout", ["10s", 10])
def test_a_timeout_shows_nothing(door: Http, clock: Clock, timeout: object) -> None:
    transaction = begin(door, timeout=timeout)
    add(door, transaction, ORDER)
    clock.move(10)
    assert error(door.post("/transactions/commit", {"transaction_id": transaction})) == (409, "transaction_over", None)
    assert seen(door) == []


def test_a_newer_instance_of_the_producer_ends_it(door: Http) -> None:
    transaction = begin(door)
    add(door, transaction, ORDER)
    door.post("/producers/init", {"producer_id": "order-service-1"})
    refused = door.post("/transactions/commit", {"transaction_id": transaction})
    assert refused.status == 409
    assert seen(door) == []


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_acks_join(door: Http, clock: Clock, end: str) -> None:
    publish(door, "in")
    lease = receive(door).json
    transaction = begin(door)
    add(door, transaction, STOCK)
    joined = {"transaction_id": transaction, "lease_id": lease["lease_id"], "offsets": [0]}
    assert door.post("/transactions/ack", joined).status == 204
    assert door.post(f"/transactions/{end}", {"transaction_id": transaction}).status == 200
    clock.move(30)
    if end == "commit":
        assert (seen(door), received(door)) == (["in", "reserve1"], [])
    else:
        assert (seen(door), payloads(received(door))) == (["in"], ["in"])


@pytest.mark.req("G14")
def test_with_a_lost_lease_nothing_is_committed(door: Http, clock: Clock) -> None:
    publish(door, "in")
    lease = receive(door).json
    transaction = begin(door)
    add(door, transaction, STOCK)
    door.post("/transactions/ack", {"transaction_id": transaction, "lease_id": lease["lease_id"]})
    clock.move(30)
    assert error(door.post("/transactions/commit", {"transaction_id": transaction}))[:2] == (409, "lease_lost")
    assert seen(door) == ["in"]


def test_open_ones_are_listed(door: Http) -> None:
    transaction = begin(door)
    add(door, transaction, ORDER, STOCK)
    (found,) = door.get("/transactions").json
    assert (found["transaction_id"], found["producer_id"], found["messages"]) == (transaction, "order-service-1", 2)
    door.post("/transactions/abort", {"transaction_id": transaction})
    assert door.get("/transactions").json == []


@pytest.mark.req("G20")
def test_bad_ones_are_refused(door: Http) -> None:
    nobody = "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e"
    for verb in ("commit", "abort"):
        path = f"/transactions/{verb}"
        assert error(door.post(path, {"transaction_id": nobody})) == (404, "transaction_not_found", None)
        assert error(door.post(path, {"transaction_id": "txn-1"})) == (422, "invalid_argument", "$.transaction_id")
        assert error(door.post(path, {})) == (422, "invalid_argument", "$.transaction_id")
    assert error(add(door, nobody, ORDER)) == (404, "transaction_not_found", None)
    assert error(door.post("/transactions/begin", {"producer_id": "no"})) == (404, "producer_not_found", None)
    for timeout in (0, -1, "soon", [], 1e300):
        refused = door.post("/transactions/begin", {"producer_id": "no", "timeout": timeout})
        assert error(refused) == (422, "invalid_argument", "$.timeout"), timeout
    transaction = begin(door)
    assert error(add(door, transaction, {"topic": "nothing", "payload": 1})) == (404, "topic_not_found", None)
    assert error(add(door, transaction, ORDER, expected_offset=0))[:2] == (422, "invalid_argument")
    assert error(add(door, transaction, {"topic": "orders"})) == (422, "invalid_argument", "$.messages[0].payload")
