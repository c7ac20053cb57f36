"""Settling over HTTP: by receipt, by lease, by place; late, twice, and many at once."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.http.conftest import Http
from tests.http.steps import error, make, payloads, place, publish, receive, received

pytestmark = [pytest.mark.core, pytest.mark.req("G5")]

NOBODY = "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e"


def depth(door: Http, group: str = "default") -> int:
    return int(door.get(f"/topics/orders/groups/{group}/stats").json["depth"])


def test_one_message_by_its_receipt_its_lease_or_its_place(http_: Http) -> None:
    make(http_)
    publish(http_, 1, 2, 3, 4)
    lease = receive(http_, max=4).json
    first, second, third, fourth = lease["messages"]
    for body in (
        {"receipt": first["receipt"]},
        {**place(second), "receipt": second["receipt"]},
        {**place(third), "lease_id": lease["lease_id"]},
        place(fourth),
    ):
        assert http_.post("/messages/ack", body).json == {"settled": 1, "dead": [], "released": []}
    assert depth(http_) == 0


def test_many_of_a_lease_and_all_of_it(http_: Http) -> None:
    make(http_)
    publish(http_, *range(6))
    lease = receive(http_, max=6).json
    some = {"lease_id": lease["lease_id"], "offsets": [0, 2, 4]}
    assert http_.post("/messages/ack", some).json["settled"] == 3
    assert depth(http_) == 3
    assert http_.post("/messages/ack", {"lease_id": lease["lease_id"]}).json["settled"] == 3
    assert depth(http_) == 0


@pytest.mark.req("C5")
def test_many_acks_of_several_leases_are_one_commit(http_: Http, db: psycopg.Connection) -> None:
    make(http_, partitions=3)
    for partition in range(3):
        publish(http_, *range(10), partition=partition)
    messages = [message for partition in range(3) for message in received(http_, f"orders/{partition}", max=10)]
    db.execute("CREATE TABLE seen (xid xid8, lease uuid)")  # xmin would tell of subtransactions
    db.execute(
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO seen VALUES (pg_current_xact_id(), OLD.lease_id); RETURN NULL; END'"
    )
    db.execute("CREATE TRIGGER see AFTER UPDATE OR DELETE ON custody.leases FOR EACH ROW EXECUTE FUNCTION see()")
    body = {"messages": [{"receipt": message["receipt"]} for message in messages]}
    assert http_.post("/messages/ack", body).json["settled"] == 30
    assert depth(http_) == 0
    assert db.execute("SELECT count(DISTINCT xid), count(DISTINCT lease) FROM seen").fetchone() == (1, 3)


@pytest.mark.req("G14")
@pytest.mark.parametrize(("verb", "more"), [("nack", {"error": "x"}), ("release", {}), ("later", {"after": "1m"})])
@pytest.mark.parametrize("whole", [False, True])
def test_a_lost_lease_among_others_is_named_and_the_others_are_settled(
    http_: Http, verb: str, more: dict[str, str], whole: bool
) -> None:
    make(http_)
    publish(http_, 1, 2, 3)
    leases = [receive(http_).json for _ in range(3)]
    http_.post("/messages/ack", {"lease_id": leases[0]["lease_id"]})
    named = [
        {"lease_id": lease["lease_id"]} if whole else {"receipt": lease["messages"][0]["receipt"]} for lease in leases
    ]
    answer = http_.post(f"/messages/{verb}", {"messages": named, **more})
    assert error(answer) == (409, "lease_lost", None)
    assert answer.json["error"].get("lost", []) == ([] if whole else [0])
    stats = http_.get("/topics/orders/groups/default/stats").json
    assert (stats["in_flight"], stats["depth"]) == (0, 2)


def test_what_is_lost_of_many_is_named_and_the_rest_is_done(http_: Http) -> None:
    make(http_)
    publish(http_, *range(4))
    messages = received(http_, max=4)
    http_.post("/messages/release", {"receipt": messages[1]["receipt"]})
    again = http_.post("/messages/ack", {"messages": [{"receipt": message["receipt"]} for message in messages]})
    assert error(again) == (409, "lease_lost", None)
    assert again.json["error"]["lost"] == [1]
    assert depth(http_) == 1


@pytest.mark.req("G14")
@pytest.mark.parametrize("verb", ["ack", "nack", "release", "later", "extend-visibility"])
@pytest.mark.parametrize("late", [0.0, 0.001, 3600.0])
def test_at_and_after_the_deadline_it_is_too_late(http_: Http, clock: Clock, verb: str, late: float) -> None:
    make(http_)
    publish(http_, 1)
    (message,) = received(http_)
    clock.move(30 + late)
    more = {"after": "1s"} if verb == "later" else {}
    for body in ({"receipt": message["receipt"]}, {"lease_id": message["receipt"].partition(":")[0]}, place(message)):
        assert error(http_.post(f"/messages/{verb}", {**body, **more}))[:2] == (409, "lease_lost")
    assert [one["attempt"] for one in received(http_)] == [2], "it changed nothing"


@pytest.mark.req("G14")
def test_just_before_the_deadline_it_is_in_time(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 1)
    (message,) = received(http_)
    clock.move(29.999)
    assert http_.post("/messages/ack", {"receipt": message["receipt"]}).status == 200


@pytest.mark.req("G5", "G6", "G7")
@pytest.mark.parametrize(
    ("verb", "more"),
    [("ack", {}), ("nack", {}), ("release", {}), ("later", {"after": 1}), ("extend-visibility", {})],
)
def test_by_its_place_alone_the_live_delivery_is_meant(
    http_: Http, clock: Clock, verb: str, more: dict[str, Any]
) -> None:
    make(http_)
    publish(http_, 1)
    (first,) = received(http_)
    clock.move(30)
    assert error(http_.post(f"/messages/{verb}", {**place(first), **more})) == (409, "lease_lost", None)
    (second,) = received(http_)
    assert (second["offset"], second["attempt"]) == (first["offset"], 2)
    assert error(http_.post(f"/messages/{verb}", {"receipt": first["receipt"], **more}))[:2] == (409, "lease_lost")
    assert http_.post(f"/messages/{verb}", {**place(second), **more}).status == 200


@pytest.mark.req("N2")
def test_a_lease_settles_nothing_that_it_does_not_hold(http_: Http) -> None:
    make(http_, partitions=2)
    make(http_, "other")
    publish(http_, 1, 2, partition=0)
    lease = receive(http_).json
    for body in (
        {"lease_id": lease["lease_id"], "offsets": [1]},
        {"lease_id": lease["lease_id"], "topic": "orders", "partition": 0, "offset": 1},
        {"lease_id": lease["lease_id"], "topic": "orders", "partition": 1, "offset": 0},
        {"lease_id": lease["lease_id"], "topic": "other", "partition": 0, "offset": 0},
        {"lease_id": NOBODY},
        {"receipt": f"{NOBODY}:0"},
    ):
        for verb in ("ack", "nack", "release"):
            assert error(http_.post(f"/messages/{verb}", body))[:2] == (409, "lease_lost"), (verb, body)
    assert depth(http_) == 2


@pytest.mark.req("G6", "V4")
def test_a_nack_is_tried_again_after_its_backoff_before_what_is_fresh(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, "first", "second", "third")
    (message,) = received(http_)
    answer = http_.post("/messages/nack", {**place(message), "requeue": True, "error": "timeout"})
    assert answer.json == {"settled": 1, "dead": [], "released": []}
    (fresh,) = received(http_)
    assert fresh["payload"] == "second", "the backoff is not over"
    clock.move(0.1)
    (again,) = received(http_)
    assert (again["payload"], again["attempt"]) == ("first", 2)
    http_.post("/messages/nack", {"receipt": again["receipt"]})
    clock.move(0.199)
    assert payloads(received(http_)) == ["third"]
    clock.move(0.001)
    (last,) = received(http_)
    assert (last["payload"], last["attempt"]) == ("first", 3)
    assert http_.post("/messages/nack", {"receipt": last["receipt"]}).json["dead"] == [0], "three deliveries in all"


@pytest.mark.req("G6")
def test_a_nack_without_requeue_is_dead_at_once(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 1)
    (message,) = received(http_)
    body = {"topic": "orders", "partition": 0, "offset": 0, "requeue": False, "error": "no such SKU"}
    assert http_.post("/messages/nack", body).json == {"settled": 1, "dead": [0], "released": []}
    (letter,) = http_.get("/topics/orders/groups/default/dead").json
    assert (letter["offset"], letter["reason"], letter["last_error"]) == (0, "rejected", "no such SKU")
    clock.move(3600)
    assert received(http_) == []
    assert message["attempt"] == 1


@pytest.mark.req("G6")
@pytest.mark.parametrize(("delay", "seconds"), [("5s", 5.0), (7, 7.0), ("250ms", 0.25)])
def test_a_nack_may_have_its_own_delay(http_: Http, clock: Clock, delay: object, seconds: float) -> None:
    make(http_)
    publish(http_, 1)
    (message,) = received(http_)
    assert http_.post("/messages/nack", {"receipt": message["receipt"], "delay": delay}).status == 200
    clock.move(seconds - 0.001)
    assert received(http_) == []
    clock.move(0.001)
    assert len(received(http_)) == 1


def test_released_and_later_messages_are_not_charged(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 1)
    (message,) = received(http_)
    assert http_.post("/messages/release", {"receipt": message["receipt"]}).json["settled"] == 1
    (message,) = received(http_)
    assert message["attempt"] == 1
    assert http_.post("/messages/later", {"receipt": message["receipt"], "after": "5m"}).status == 200
    clock.move(299.9)
    assert received(http_) == []
    clock.move(0.1)
    assert [one["attempt"] for one in received(http_)] == [1]


def test_many_outcomes_of_a_lease_in_one_request(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, *range(5))
    lease = receive(http_, max=5).json
    outcomes = [
        {"offset": 0, "outcome": "ack"},
        {"offset": 1, "outcome": "nack", "error": "timeout", "delay": "10s"},
        {"offset": 2, "outcome": "reject"},
        {"offset": 3, "outcome": "release"},
        {"offset": 4, "outcome": "later", "delay": 20},
    ]
    settled = http_.post("/messages/settle", {"lease_id": lease["lease_id"], "outcomes": outcomes})
    assert settled.json == {"settled": 5, "dead": [2], "released": []}
    assert payloads(received(http_, max=5)) == [3]
    clock.move(20)
    assert payloads(received(http_, max=5)) == [1, 4]
    twice = [{"offset": 0, "outcome": "ack"}] * 2
    refused = http_.post("/messages/settle", {"lease_id": lease["lease_id"], "outcomes": twice})
    assert error(refused) == (422, "invalid_argument", "$.outcomes")


def test_in_an_ordered_group_what_comes_after_a_failure_leaves_the_lease(http_: Http) -> None:
    make(http_, group="stock", policy={"ordering": "key"})
    publish(http_, "a1", "a2", "a3", key="a")
    lease = receive(http_, group="stock", max=3).json
    out_of_turn = http_.post("/messages/ack", {"lease_id": lease["lease_id"], "offsets": [1]})
    assert error(out_of_turn)[:2] == (409, "order_conflict")
    failed = http_.post("/messages/nack", {"lease_id": lease["lease_id"], "offsets": [0]})
    assert failed.json == {"settled": 1, "dead": [], "released": [1, 2]}


@pytest.mark.req("G7")
@pytest.mark.parametrize("timeout", [60, "60s", "1m"])
def test_extending_sets_the_deadline_to_now_plus_the_timeout(http_: Http, clock: Clock, timeout: object) -> None:
    make(http_)
    publish(http_, 1)
    (message,) = received(http_)
    clock.move(20)
    extended = http_.post("/messages/extend-visibility", {**place(message), "timeout_seconds": timeout})
    assert (extended.status, extended.json) == (200, {"deadline": "2030-01-01T00:01:20Z"})
    clock.move(59.999)
    assert received(http_) == []
    assert http_.post("/messages/ack", {"receipt": message["receipt"]}).status == 200


@pytest.mark.req("G7")
def test_extending_a_lease_extends_all_that_it_holds(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 1, 2)
    lease = receive(http_, max=2).json
    clock.move(29)
    extended = http_.post("/messages/extend-visibility", {"lease_id": lease["lease_id"]})
    assert extended.json == {"deadline": "2030-01-01T00:00:59Z"}, "as long as the group says"
    clock.move(29)
    assert received(http_, max=2) == []


@pytest.mark.req("G20")
@pytest.mark.parametrize(
    ("verb", "body", "path"),
    [
        ("ack", {"receipt": "x"}, "$.receipt"),
        ("ack", {"receipt": f"{NOBODY}:99999999999999999999"}, "$.receipt"),
        ("ack", {"receipt": 5}, "$.receipt"),
        ("ack", {"lease_id": "x"}, "$.lease_id"),
        ("ack", {"lease_id": NOBODY, "offsets": []}, "$.offsets"),
        ("ack", {"lease_id": NOBODY, "offsets": [-1]}, "$.offsets[0]"),
        ("ack", {"lease_id": NOBODY, "offsets": [2**63 - 1]}, "$.offsets[0]"),
        ("ack", {"lease_id": NOBODY, "offsets": [1, "2"]}, "$.offsets[1]"),
        ("ack", {"messages": []}, "$.messages"),
        ("ack", {"messages": [{"reciept": "x"}]}, "$.messages[0].reciept"),
        ("ack", {"topic": "orders", "partition": 0, "offset": "0"}, "$.offset"),
        ("ack", {"topic": "or\0ders", "partition": 0, "offset": 0}, "$.topic"),
        ("nack", {"receipt": f"{NOBODY}:0", "delay": "soon"}, "$.delay"),
        ("nack", {"receipt": f"{NOBODY}:0", "requeue": "yes"}, "$.requeue"),
        ("nack", {"receipt": f"{NOBODY}:0", "error": ["x"]}, "$.error"),
        ("later", {"receipt": f"{NOBODY}:0"}, "$.after"),
        ("extend-visibility", {"receipt": f"{NOBODY}:0", "timeout_seconds": 0}, "$.timeout_seconds"),
        ("extend-visibility", {"receipt": f"{NOBODY}:0", "timeout_seconds": "x"}, "$.timeout_seconds"),
        ("extend-visibility", {"receipt": f"{NOBODY}:0", "timeout_seconds": 1e18}, "$.timeout_seconds"),
        ("settle", {"lease_id": NOBODY, "outcomes": [{"offset": 0, "outcome": "no"}]}, "$.outcomes[0].outcome"),
        ("settle", {"outcomes": []}, "$.lease_id"),
        ("ack", [], "$"),
    ],
)
def test_a_bad_field_is_named(http_: Http, verb: str, body: object, path: str) -> None:
    make(http_)
    assert error(http_.post(f"/messages/{verb}", body)) == (422, "invalid_argument", path)


@pytest.mark.req("G20")
@pytest.mark.parametrize("verb", ["ack", "nack", "release", "extend-visibility"])
def test_an_unclear_reference_is_refused(http_: Http, verb: str) -> None:
    make(http_, group="default")
    for body in ({}, {"topic": "orders"}, {"topic": "orders", "partition": 0}, {"group": "default"}):
        assert error(http_.post(f"/messages/{verb}", body))[:2] == (422, "invalid_argument"), body
    for body, code in (
        ({"topic": "nothing", "partition": 0, "offset": 0}, "topic_not_found"),
        ({"topic": "orders", "group": "nobody", "partition": 0, "offset": 0}, "group_not_found"),
        ({"topic": "orders", "partition": 9, "offset": 0}, "partition_not_found"),
    ):
        assert error(http_.post(f"/messages/{verb}", body)) == (404, code, None)


def test_an_error_text_may_be_anything(http_: Http) -> None:
    make(http_)
    publish(http_, 1)
    (message,) = received(http_)
    body = {"receipt": message["receipt"], "requeue": False, "error": "é\0\n" + "x" * 100_000}
    assert http_.post("/messages/nack", body).status == 200
    (letter,) = http_.get("/topics/orders/groups/default/dead").json
    assert letter["last_error"].startswith("é")


def test_a_repeated_ack_is_answered_as_one(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 1, 2, 3)
    lease = receive(http_, max=3).json
    first, second, third = lease["messages"]
    whole, one = {"lease_id": lease["lease_id"]}, {"receipt": first["receipt"]}
    assert http_.post("/messages/ack", one).json == {"settled": 1, "dead": [], "released": []}
    again = http_.post("/messages/ack", one)
    assert (again.status, again.json) == (200, {"settled": 1, "dead": [], "released": [], "already": True})
    assert http_.post("/messages/ack", {"messages": [one, {"receipt": second["receipt"]}]}).json["already"] is True
    assert error(http_.post("/messages/nack", one))[:2] == (409, "lease_lost")
    assert http_.post("/messages/release", {"receipt": third["receipt"]}).status == 200
    assert http_.post("/messages/release", {"receipt": third["receipt"]}).json["already"] is True
    assert http_.post("/messages/ack", whole).json == {"settled": 2, "dead": [], "released": [], "already": True}
    elsewhere = {**one, "topic": "other"}
    assert error(http_.post("/messages/ack", elsewhere))[:2] == (409, "lease_lost")
    assert error(http_.post("/messages/ack", place(first)))[:2] == (409, "lease_lost")  # which delivery is not said
    assert depth(http_) == 1


@pytest.mark.req("X1")
def test_what_a_whole_lease_has_lost_is_named(http_: Http) -> None:
    make(http_)
    publish(http_, 1, 2, 3, 4)
    body = {"lease_id": receive(http_, max=4).json["lease_id"]}
    assert http_.post("/topics/orders/groups/default/rewind", {"to_offset": 2}).status == 200
    for verb, more in (("extend-visibility", {}), ("ack", {})):
        refused = http_.post(f"/messages/{verb}", {**body, **more})
        assert error(refused)[:2] == (409, "lease_lost")
        assert refused.json["error"]["lost"] == [2, 3]
    assert depth(http_) == 2


def test_one_outcome_for_all_that_is_left_of_a_lease(http_: Http) -> None:
    make(http_, group="default", policy={"max_attempts": 1})
    publish(http_, *range(3))
    lease = receive(http_, max=3).json["lease_id"]
    http_.post("/messages/ack", {"lease_id": lease, "offsets": [0]})
    body = {"lease_id": lease, "all": {"outcome": "nack", "error": "timeout"}}
    assert http_.post("/messages/settle", body).json == {"settled": 2, "dead": [1, 2], "released": []}
    assert http_.post("/messages/settle", body).json["already"]
    for wrong in ({}, {"outcomes": [{"offset": 1, "outcome": "ack"}], "all": {"outcome": "ack"}}):
        assert error(http_.post("/messages/settle", {"lease_id": lease, **wrong}))[:2] == (422, "invalid_argument")
