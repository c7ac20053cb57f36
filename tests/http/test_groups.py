"""Groups over HTTP: their policies, and what an operator does with them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from tests.conftest import Clock
from tests.http.conftest import Http
from tests.http.steps import error, make, payloads, place, publish, receive, received
from tests.waiting import wait_for

pytestmark = [pytest.mark.core, pytest.mark.req("G2")]

GROUP = "/topics/orders/groups/stock"


def test_changes_of_different_fields_at_once_are_all_kept(
    http_: Http, database_url: str, db: psycopg.Connection
) -> None:
    make(http_, group="stock")
    fields = {"max_attempts": 7, "visibility_timeout": 60.0, "max_in_flight": 9, "max_parked": 5}
    with psycopg.connect(database_url) as holder, ThreadPoolExecutor(4) as clients:
        holder.execute("SELECT FROM custody.groups FOR UPDATE")
        asked = [clients.submit(http_, "PATCH", GROUP, {"policy": {name: value}}) for name, value in fields.items()]
        waiting = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        wait_for(lambda: len(db.execute(waiting).fetchall()) == 3, "all operators' threads are at it")
        holder.rollback()
        assert [one.result().status for one in asked] == [200] * 4
    policy = http_.get(GROUP).json["policy"]
    assert {name: policy[name] for name in fields} == fields


def test_a_policy_and_bindings_are_changed_together_or_not_at_all(http_: Http) -> None:
    make(http_, group="stock", policy={"ordering": "key", "fairness": "key"})
    both = {"policy": {"max_attempts": 7}, "bindings": ["orders.*"]}
    assert error(http_("PATCH", GROUP, both))[:2] == (422, "invalid_argument")  # fair and bound at once
    assert http_.get(GROUP).json["policy"]["max_attempts"] == 3
    both["policy"]["fairness"] = None
    changed = http_("PATCH", GROUP, both).json
    assert (changed["policy"]["max_attempts"], changed["policy"]["fairness"]) == (7, None)
    assert [binding["pattern"] for binding in changed["bindings"]] == ["orders.*"]


@pytest.mark.req("G8")
def test_a_group_has_the_defaults(http_: Http) -> None:
    make(http_)
    made = http_.post("/topics/orders/groups", {"name": "stock"})
    assert made.status == 201
    assert made.json == {
        "topic": "orders",
        "name": "stock",
        "bare": False,
        "policy": {
            "ordering": "none",
            "max_attempts": 3,
            "retry_for": None,
            "backoff": {"kind": "exponential", "initial": 0.1, "cap": 30.0, "jitter": 0.0, "multiplier": 2.0},
            "visibility_timeout": 30.0,
            "handler_timeout": 300.0,
            "on_dead": "release",
            "dead_letter": "keep",
            "max_in_flight": None,
            "max_ack_holes": 10_000,
            "max_parked": None,
            "breaker": None,
            "fairness": None,
            "tenant_separator": ":",
        },
        "paused_at": None,
        "paused_reason": None,
        "created_at": "2030-01-01T00:00:00+00:00",
        "bindings": [],
    }
    assert http_.get(GROUP).json == made.json
    assert http_.get("/topics/orders/groups").json == [made.json]
    assert error(http_.post("/topics/orders/groups", {"name": "stock"})) == (409, "group_exists", None)


def test_a_policy_is_given_and_changed_field_by_field(http_: Http) -> None:
    policy = {
        "ordering": "key",
        "max_attempts": 5,
        "backoff": {"kind": "linear", "initial": "2s", "cap": "1m"},
        "visibility_timeout": "90s",
        "handler_timeout": 600,
        "dead_letter": "topic",
        "breaker": {"failure_rate": 0.25, "window": "1m"},
    }
    make(http_, group="stock", policy=policy)
    given = http_.get(GROUP).json["policy"]
    assert (given["ordering"], given["max_attempts"], given["dead_letter"]) == ("key", 5, "topic")
    assert given["backoff"] == {"kind": "linear", "initial": 2.0, "cap": 60.0, "jitter": 0.0}
    assert (given["visibility_timeout"], given["handler_timeout"]) == (90.0, 600.0)
    assert given["breaker"] == {"failure_rate": 0.25, "min_outcomes": 20, "window": 60.0, "probe_after": 5.0}
    changed = http_("PATCH", GROUP, {"policy": {"max_attempts": 7, "breaker": None, "handler_timeout": None}})
    assert changed.status == 200
    assert changed.json["policy"] == {**given, "max_attempts": 7, "breaker": None, "handler_timeout": None}
    assert error(http_("PATCH", GROUP, {}))[:2] == (422, "invalid_argument")


@pytest.mark.parametrize(
    ("policy", "path"),
    [
        ({"max_attempts": 0}, "$.policy.max_attempts"),
        ({"max_attempts": 2**31}, "$.policy.max_attempts"),
        ({"max_attempts": "3"}, "$.policy.max_attempts"),
        ({"max_in_flight": 2**70}, "$.policy.max_in_flight"),
        ({"ordering": []}, "$.policy.ordering"),
        ({"ordering": "size"}, "$.policy.ordering"),
        ({"on_dead": "hold"}, "$.policy"),
        ({"backoff": None}, "$.policy.backoff"),
        ({"backoff": {"kind": []}}, "$.policy.backoff.kind"),
        ({"backoff": {"initial": "x"}}, "$.policy.backoff.initial"),
        ({"backoff": {"multiplier": 0.5}}, "$.policy.backoff.multiplier"),
        ({"backoff": {"kind": "linear", "multiplier": 2}}, "$.policy"),
        ({"breaker": 5}, "$.policy.breaker"),
        ({"breaker": {"min_outcomes": 1.5}}, "$.policy.breaker.min_outcomes"),
        ({"breaker": {"window": 0}}, "$.policy.breaker.window"),
        ({"tenant_separator": ["a"]}, "$.policy.tenant_separator"),
        ({"tenant_separator": "\0"}, "$.policy.tenant_separator"),
        ({"visibility_timeout": 0}, "$.policy.visibility_timeout"),
        ({"visibility_timeout": None}, "$.policy.visibility_timeout"),
        ({"max_atempts": 3}, "$.policy.max_atempts"),
        ([], "$.policy"),
    ],
)
@pytest.mark.req("G20")
def test_a_bad_field_of_a_policy_is_named(http_: Http, policy: object, path: str) -> None:
    make(http_, group="stock")
    before = http_.get(GROUP).json
    for answer in (
        http_.post("/topics/orders/groups", {"name": "other", "policy": policy}),
        http_("PATCH", GROUP, {"policy": policy}),
    ):
        assert (answer.status, error(answer)[2]) == (422, path)
    assert http_.get("/topics/orders/groups").json == [before]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"name": "a b"}, "$.name"),
        ({"name": "x", "start": "soon"}, "$.start"),
        ({"name": "x", "start": "2030-01-01T00:00:00"}, "$.start"),
        ({"name": "x", "start": -1}, "$.start"),
        ({"name": "x", "start": 2**63}, "$.start"),
        ({"name": "x", "start": None}, "$.start"),
        ({"name": "x", "bindings": ["orders.>", "a..b"]}, "$.bindings[1]"),
        ({"name": "x", "bindings": [{}]}, "$.bindings[0]"),
        ({"name": "x", "bindings": [5]}, "$.bindings[0]"),
        ({"name": "x", "bindings": [{"headers": {"a": 1}}]}, "$.bindings[0].headers[...]"),
    ],
)
@pytest.mark.req("G20")
def test_a_bad_field_of_a_group_is_named(http_: Http, body: object, path: str) -> None:
    make(http_)
    assert error(http_.post("/topics/orders/groups", body)) == (422, "invalid_argument", path)


def test_a_group_goes(http_: Http) -> None:
    make(http_, group="stock")
    assert http_("DELETE", GROUP).status == 204
    for method, path in (("DELETE", GROUP), ("GET", GROUP), ("GET", f"{GROUP}/stats"), ("POST", f"{GROUP}/resume")):
        assert error(http_(method, path)) == (404, "group_not_found", None)


@pytest.mark.req("V9")
def test_a_group_starts_where_it_is_told_to(http_: Http, clock: Clock) -> None:
    make(http_)
    publish(http_, 0, 1)
    clock.move(60)
    publish(http_, 2)
    for name, start, first in (
        ("all", "earliest", [0]),
        ("new", "latest", []),
        ("second", 1, [1]),
        ("timed", "2030-01-01T00:00:30Z", [2]),
    ):
        assert http_.post("/topics/orders/groups", {"name": name, "start": start}).status == 201
        assert payloads(received(http_, group=name)) == first, name
    assert error(http_.post("/topics/orders/groups", {"name": "far", "start": 9}))[:2] == (422, "offset_out_of_range")


@pytest.mark.req("V11")
def test_a_group_gets_what_it_is_bound_to(http_: Http) -> None:
    make(http_)
    bindings = ["orders.*.paid", {"headers": {"country": "FR"}}]
    assert http_.post("/topics/orders/groups", {"name": "stock", "bindings": bindings}).status == 201
    publish(http_, "paid", routing_key="orders.7.paid")
    publish(http_, "sent", routing_key="orders.7.sent")
    publish(http_, "french", headers={"country": "FR"})
    assert payloads(received(http_, group="stock", max=10)) == ["paid", "french"]
    changed = http_("PATCH", GROUP, {"bindings": None})
    assert changed.json["bindings"] == []


@pytest.mark.req("G17", "G20")
def test_a_paused_group_says_so_and_goes_on_when_resumed(http_: Http) -> None:
    make(http_, group="stock")
    publish(http_, 1)
    assert http_.post(f"{GROUP}/pause", {"reason": "stocktaking"}).json == {"changed": True}
    assert http_.post(f"{GROUP}/pause").json == {"changed": False}
    paused = receive(http_, group="stock")
    assert error(paused) == (503, "paused", None)
    assert "stocktaking" in paused.json["error"]["message"]
    assert int(paused.headers["retry-after"]) >= 1
    assert http_.get(GROUP).json["paused_reason"] == "stocktaking"
    assert http_(method="POST", path=f"{GROUP}/resume").json == {"changed": True}
    assert payloads(received(http_, group="stock")) == [1]


@pytest.mark.req("C6", "G20")
@pytest.mark.parametrize(
    ("policy", "code"), [({"max_in_flight": 2}, "max_in_flight"), ({"max_ack_holes": 1}, "ack_hole_cap_exceeded")]
)
def test_a_capped_group_says_so_until_there_is_room(http_: Http, policy: dict[str, object], code: str) -> None:
    make(http_, group="stock", policy=policy)
    publish(http_, *range(8))
    lease = received(http_, group="stock", max=2)
    assert http_.post("/messages/ack", {"receipt": lease[1]["receipt"]}).status == 200
    more = received(http_, group="stock") if code == "max_in_flight" else []
    refused = receive(http_, group="stock")
    assert error(refused) == (429, code, None)
    assert int(refused.headers["retry-after"]) >= 1
    for message in (lease[0], *more):
        assert http_.post("/messages/ack", {"receipt": message["receipt"]}).status == 200
    assert len(received(http_, group="stock")) == 1, "nothing was dropped"


@pytest.mark.req("C8")
def test_the_figures_of_a_group(http_: Http, clock: Clock) -> None:
    make(http_, group="stock", policy={"backoff": {"kind": "constant", "initial": "10s"}})
    publish(http_, *range(6))
    leased = received(http_, group="stock", max=4)
    http_.post("/messages/ack", {"receipt": leased[1]["receipt"]})
    http_.post("/messages/nack", {"receipt": leased[0]["receipt"]})
    http_.post("/messages/nack", {"receipt": leased[3]["receipt"], "requeue": False})
    found = http_.get(f"{GROUP}/stats").json
    figures = {name: found[name] for name in ("lag", "waiting", "in_flight", "parked", "dead", "depth", "tail")}
    assert figures == {"lag": 2, "waiting": 1, "in_flight": 1, "parked": 0, "dead": 1, "depth": 4, "tail": [6]}
    assert found["oldest_unresolved"] == "2030-01-01T00:00:00+00:00"
    assert [one["partition"] for one in found["partitions"]] == [0]
    assert http_.get(f"{GROUP}/due").json == {"due": 10.0}


@pytest.mark.req("G17", "V9")
def test_a_rewind_revokes_leases_and_gives_everything_again(http_: Http) -> None:
    make(http_, group="stock")
    publish(http_, 0, 1, 2)
    first = received(http_, group="stock", max=2)
    http_.post("/messages/ack", {"receipt": first[0]["receipt"]})
    dry = http_.post(f"{GROUP}/rewind", {"to_offset": 0, "dry_run": True})
    assert dry.json == {"dry_run": True, "partitions": [{"partition": 0, "target": 0, "messages": 2}]}
    done = http_.post(f"{GROUP}/rewind", {"to_offset": 0, "reason": "a bug"})
    assert (done.status, done.json["dry_run"]) == (200, False)
    late = http_.post("/messages/ack", {"receipt": first[1]["receipt"]})
    assert error(late) == (409, "lease_lost", None)
    assert payloads(received(http_, group="stock", max=10)) == [0, 1, 2]
    assert error(http_.post(f"{GROUP}/rewind", {}))[:2] == (422, "invalid_argument")
    assert error(http_.post(f"{GROUP}/rewind", {"to_time": "2030-01-01"})) == (422, "invalid_argument", "$.to_time")


@pytest.mark.req("G17", "K8")
def test_blocked_keys_are_listed_released_and_skipped(http_: Http) -> None:
    make(http_, group="stock", policy={"ordering": "key", "on_dead": "hold", "max_attempts": 1})
    publish(http_, "a1", "a2", "a3", key="a")
    (first,) = received(http_, group="stock")
    assert http_.post("/messages/nack", {"receipt": first["receipt"], "error": "sold out"}).json["dead"] == [0]
    assert received(http_, group="stock") == []
    (blocked,) = http_.get(f"{GROUP}/blocked").json
    assert (blocked["key"], blocked["why"], blocked["blocked_by"]) == ("a", "held", 0)
    assert blocked["last_error"] == "sold out"
    assert http_.post(f"{GROUP}/blocked/release", {"key": "a"}).json == {"count": 1}
    assert [one for one in http_.get(f"{GROUP}/blocked").json if one["why"] == "held"] == []
    (second,) = received(http_, group="stock")
    assert second["payload"] == "a2"
    http_.post("/messages/nack", {"receipt": second["receipt"]})
    assert http_.post(f"{GROUP}/blocked/skip", {"partition": 0, "offset": 1, "reason": "old"}).status == 204
    assert payloads(received(http_, group="stock")) == ["a3"]
    again = http_.post(f"{GROUP}/blocked/skip", {"partition": 0, "offset": 1})
    assert error(again) == (409, "not_skippable", None)
    assert error(http_.post(f"{GROUP}/blocked/release", {})) == (422, "invalid_argument", "$.key")


@pytest.mark.req("V2")
def test_a_bare_group_is_only_a_cursor(http_: Http) -> None:
    make(http_)
    assert http_.post("/topics/orders/groups", {"name": "stock", "bare": True}).json["policy"] is None
    publish(http_, 0, 1, 2)
    assert payloads(http_.get(f"{GROUP}/fetch?max=2").json) == [0, 1]
    assert http_.post(f"{GROUP}/commit", {"partition": 0, "next_offset": 2}).status == 204
    assert payloads(http_.get(f"{GROUP}/fetch").json) == [2]
    assert error(receive(http_, group="stock")) == (409, "bare_group", None)
    assert error(http_("PATCH", GROUP, {"policy": {"max_attempts": 1}})) == (409, "bare_group", None)
    make(http_, "payments", group="g")
    assert error(http_.get("/topics/payments/groups/g/fetch")) == (409, "lifecycle_group", None)


@pytest.mark.req("G4")
def test_the_default_group_is_made_by_the_first_receive_and_others_are_not(http_: Http) -> None:
    make(http_)
    publish(http_, "before anybody came")
    assert error(receive(http_, group="stock")) == (404, "group_not_found", None)
    assert http_.get("/topics/orders/groups").json == []
    (message,) = received(http_)
    assert message["payload"] == "before anybody came"
    assert [group["name"] for group in http_.get("/topics/orders/groups").json] == ["default"]
    assert http_.post("/messages/ack", place(message)).json["settled"] == 1
