"""/metrics: what the server counts, and the figures of the database, as long as there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.http.conftest import Http
from tests.waiting import wait_for

import custody
from custody import Breaker, Policy
from custody.http import database_metrics
from custody.http import metrics as counting
from custody.outbox import metrics as outbox_metrics
from custody.outbox import write

pytestmark = [pytest.mark.core, pytest.mark.req("G18")]

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(http: Http, timeout: float = 30) -> Samples:
    answer = http.get("/metrics", timeout=timeout)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test looks twice within a second."""
    monkeypatch.setattr(database_metrics, "KEEP", 0.0)


@pytest.fixture
def orders(c: custody.Custody) -> custody.Custody:
    c.create_topic("orders")
    c.create_group("orders", "default")
    return c


def publish(http: Http, count: int, **more: Any) -> None:
    answer = http.post("/messages", {"topic": "orders", "messages": [{"payload": n} for n in range(count)], **more})
    assert answer.status == 200, answer.body


def test_requests_are_counted_by_method_route_and_status(orders: custody.Custody, http_: Http) -> None:
    publish(http_, 1)
    publish(http_, 1)
    assert http_.post("/messages", {"topic": "none", "payload": 1}).status == 404
    for path in ("/what", "/what/ever", "/topics/orders/nothing"):
        assert http_.get(path).status == 404
    assert http_("PROPFIND", "/messages").status == 405
    found = scraped(http_)
    name = "custody_http_requests_total"
    assert value(found, name, method="POST", route="/messages", status="200") == 2
    assert value(found, name, method="POST", route="/messages", status="404") == 1
    assert value(found, name, method="GET", route="-", status="404") == 3
    assert value(found, name, method="-", route="-", status="405") == 1
    routes = {dict(labels)["route"] for of, labels in found if of == name}
    assert not any("what" in route or "orders" in route for route in routes), "no series for each path"
    assert value(found, "custody_http_request_duration_seconds_count", method="POST", route="/messages") == 3
    took = value(found, "custody_http_request_duration_seconds_sum", method="POST", route="/messages")
    assert took is not None
    assert 0 < took < 60


def test_messages_that_come_again_are_counted_apart(orders: custody.Custody, http_: Http) -> None:
    publish(http_, 3)
    lease = http_.get("/messages/orders?max=3").json["lease_id"]
    http_.post("/messages/nack", {"lease_id": lease, "offsets": [0, 2], "delay": 0})
    assert len(http_.get("/messages/orders?max=3").json["messages"]) == 2
    found = scraped(http_)
    assert value(found, "custody_messages_received_total", topic="orders", group="default") == 5
    assert value(found, "custody_messages_redelivered_total", topic="orders", group="default") == 2


def test_messages_are_counted_by_topic_group_and_outcome(orders: custody.Custody, http_: Http) -> None:
    http_.post("/producers/init", {"producer_id": "p"})
    for _ in range(2):
        publish(http_, 12, producer_id="p", epoch=1, sequence=0)
    lease = http_.get("/messages/orders?max=8").json
    receipts = [message["receipt"] for message in lease["messages"]]
    named = {"topic": "orders", "partition": 0}
    for verb, extra in (
        ("ack", {}),
        ("nack", {}),
        ("nack", {"requeue": False}),
        ("release", {}),
        ("later", {"after": "1h"}),
        ("skip", {"reason": "cancelled"}),
    ):
        assert http_.post(f"/messages/{verb}", {**named, "receipt": receipts.pop(0), **extra}).status == 200
    assert http_.post("/messages/ack", {"messages": [{"receipt": one} for one in receipts[:1]]}).status == 200
    outcomes = [{"offset": 7, "outcome": "dead"}]
    assert http_.post("/messages/settle", {"lease_id": lease["lease_id"], "outcomes": outcomes}).status == 200
    singles = [{"lease_id": http_.get("/messages/orders").json["lease_id"]} for _ in range(2)]
    assert http_.post("/messages/ack", {"messages": singles}).status == 200
    assert len(http_.get("/messages/orders?max=2&auto_ack=true").json["messages"]) == 2
    found = scraped(http_)
    assert value(found, "custody_messages_published_total", topic="orders") == 12
    assert value(found, "custody_messages_duplicate_total", topic="orders") == 12
    assert value(found, "custody_messages_received_total", topic="orders", group="default") == 12
    assert value(found, "custody_messages_redelivered_total", topic="orders", group="default") == 0
    settled = {
        dict(labels)["outcome"]: count
        for (name, labels), count in found.items()
        if name == "custody_messages_settled_total" and ("group", "default") in labels
    }
    assert settled == {"ack": 6, "nack": 1, "reject": 1, "release": 1, "later": 1, "skip": 1, "dead": 1}
    assert value(found, "custody_coalesced_requests_count", operation="ack") == 2
    assert value(found, "custody_coalesced_requests_sum", operation="publish") == 2


def test_a_message_that_is_named_by_its_offset_alone_is_counted(orders: custody.Custody, http_: Http) -> None:
    publish(http_, 1)
    http_.get("/messages/orders")
    assert http_.post("/messages/ack", {"topic": "orders", "partition": 0, "offset": 0}).status == 200
    found = scraped(http_)
    assert value(found, "custody_messages_settled_total", topic="orders", group="default", outcome="ack") == 1


def test_messages_of_a_transaction_are_counted_by_its_commit(orders: custody.Custody, http_: Http) -> None:
    http_.post("/producers/init", {"producer_id": "p"})
    begun = http_.post("/transactions/begin", {"producer_id": "p", "epoch": 1})
    assert begun.status == 200, begun.body
    answer = http_.post("/messages", {"topic": "orders", "payload": 1, "transaction_id": begun.json["transaction_id"]})
    assert answer.status == 202
    assert value(scraped(http_), "custody_messages_published_total", topic="orders") is None
    http_.post("/transactions/commit", {"transaction_id": begun.json["transaction_id"]})
    assert value(scraped(http_), "custody_messages_published_total", topic="orders") == 1


def test_deaths_are_counted_from_zero_on(c: custody.Custody, http_: Http) -> None:
    c.create_topic("orders")
    c.create_group("orders", "default", Policy(max_attempts=1, breaker=None))
    publish(http_, 6)

    def deaths(group: str = "default") -> float | None:
        topic = "-" if group == "-" else "orders"
        return value(scraped(http_), "custody_messages_dead_total", topic=topic, group=group)

    assert (deaths(), deaths("-")) == (None, 0)
    lease = http_.get("/messages/orders?max=5").json["lease_id"]
    assert deaths() == 0, "a series that begins with its first death has not risen"
    http_.post("/messages/nack", {"lease_id": lease, "offsets": [0, 1]})
    http_.post("/messages/nack", {"lease_id": lease, "offset": 2, "requeue": False})
    outcomes = [{"offset": 3, "outcome": "dead"}, {"offset": 4, "outcome": "ack"}]
    http_.post("/messages/settle", {"lease_id": lease, "outcomes": outcomes})
    http_.post("/topics/orders/groups/default/redrive")
    assert deaths() == 4, "whatever is redriven"
    other = c.claim("orders", "default").lease_id
    http_.post("/messages/nack", {"lease_id": str(other)})
    assert (deaths(), deaths("-")) == (4, 1)


def test_what_is_known_of_leases_is_bounded(
    orders: custody.Custody, http_: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "LEASES", 1)
    publish(http_, 2)
    first, second = (http_.get("/messages/orders").json["lease_id"] for _ in range(2))
    for lease in (first, second):
        assert http_.post("/messages/ack", {"lease_id": lease}).status == 200
    found = scraped(http_)
    for topic, group in (("-", "-"), ("orders", "default")):
        assert value(found, "custody_messages_settled_total", topic=topic, group=group, outcome="ack") == 1


def test_those_who_wait_are_counted(orders: custody.Custody, http_: Http) -> None:
    assert value(scraped(http_), "custody_waiting_polls") == 0
    poll = threading.Thread(target=http_.get, args=["/messages/orders?wait=30s"])
    poll.start()
    wait_for(lambda: value(scraped(http_), "custody_waiting_polls") == 1, "the poll waits")
    publish(http_, 1)
    poll.join(20)
    assert value(scraped(http_), "custody_waiting_polls") == 0


def test_connections_are_told(orders: custody.Custody, http_: Http) -> None:
    found = scraped(http_)
    states = {state: value(found, "custody_database_connections", state=state) for state in ("in_use", "idle")}
    assert all(count is not None and count >= 0 for count in states.values())
    assert sum(count or 0 for count in states.values()) >= 1
    assert value(found, "custody_database_connections_max") == 10
    assert value(found, "custody_database_connections_waiting") == 0


def test_the_figures_of_groups_topics_and_outbox_are_those_of_the_database(
    c: custody.Custody, clock: Any, http_: Http, db: psycopg.Connection[Any]
) -> None:
    c.create_topic("orders", partitions=2)
    c.create_group("orders", "g", Policy(breaker=Breaker(min_outcomes=3), max_attempts=1))
    c.create_group("orders", "paused", Policy(breaker=None), bindings=["orders.>"])
    c.pause("orders", "paused")
    c.publish_many("orders", [custody.Outgoing(n, partition=0) for n in range(10)])
    c.claim("orders", "g", max_messages=3).nack()
    with db.transaction():
        write(db, event_type="made", payload={"n": 1}, destination="stdout:")
    clock.move(60)
    found = scraped(http_)
    stats = c.stats("orders", "g")
    for name in ("lag", "waiting", "in_flight", "holes", "parked", "dead", "depth"):
        assert value(found, f"custody_group_{name}", topic="orders", group="g") == getattr(stats, name)
    assert stats.dead == 3
    assert value(found, "custody_group_oldest_unresolved_age_seconds", topic="orders", group="g") == 60
    assert [value(found, "custody_group_paused", topic="orders", group=group) for group in ("g", "paused")] == [0, 1]
    assert [value(found, "custody_group_bound", topic="orders", group=group) for group in ("g", "paused")] == [0, 1]
    states = {
        state: value(found, "custody_group_breaker_state", topic="orders", group="g", state=state)
        for state in ("closed", "open", "probing")
    }
    assert states == {"closed": 0, "open": 1, "probing": 0}
    assert value(found, "custody_group_breaker_state", topic="orders", group="paused", state="closed") is None
    assert value(found, "custody_topic_messages", topic="orders") == 10
    assert value(found, "custody_topic_appended_total", topic="orders") == 10
    assert value(found, "custody_outbox_backlog", destination="stdout:") == 1
    assert value(found, "custody_up") == 1


@pytest.mark.req("S6")
def test_the_state_of_pipelines_is_told(c: custody.Custody, clock: Any, http_: Http) -> None:
    c.create_topic("orders")
    for group in ("fails", "dies"):
        c.create_group("orders", group)
    failing, _ = c.drive("orders", "fails")
    c.drive("orders", "dies")
    clock.move(10)
    failing.report("retrying", tries=3, error="no disk")
    clock.move(15)
    found = scraped(http_)
    states = ("running", "retrying", "stopped", "failed", "gone")

    def state(group: str) -> list[str]:
        told = {one: value(found, "custody_pipeline_state", topic="orders", group=group, state=one) for one in states}
        assert {*told.values()} == {0, 1}
        return [one for one in states if told[one]]

    assert (state("fails"), state("dies")) == (["retrying"], ["gone"])
    assert value(found, "custody_pipeline_tries", topic="orders", group="fails") == 3
    assert value(found, "custody_pipeline_state_seconds", topic="orders", group="fails") == 15
    assert value(found, "custody_pipeline_seen_seconds", topic="orders", group="dies") == 25


def test_many_who_ask_at_once_cost_one_look(
    orders: custody.Custody, http_: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_metrics, "KEEP", 60.0)
    looks: list[datetime] = []
    look = custody.Custody.overview

    def counted(self: custody.Custody, **rest: Any) -> Any:
        looks.append(datetime.now(UTC))
        return look(self, **rest)

    monkeypatch.setattr(custody.Custody, "overview", counted)
    asking = [threading.Thread(target=scraped, args=[http_]) for _ in range(5)]
    for one in asking:
        one.start()
    for one in asking:
        one.join(20)
    scraped(http_)
    assert len(looks) == 1


def test_without_an_answer_of_the_database_the_server_tells_of_itself(
    orders: custody.Custody,
    serve: Callable[..., Http],
    monkeypatch: pytest.MonkeyPatch,
    database_url: str,
) -> None:
    monkeypatch.setattr(database_metrics, "LIMIT", 0.3)
    http = serve()
    publish(http, 1)
    with psycopg.connect(database_url) as connection:
        connection.execute("LOCK TABLE custody.groups IN ACCESS EXCLUSIVE MODE")
        found = scraped(http, timeout=4)
        assert value(found, "custody_up") == 0
        assert value(found, "custody_messages_published_total", topic="orders") == 1
        assert value(found, "custody_http_requests_total", method="POST", route="/messages", status="200") == 1
        assert not any(name.startswith("custody_group_") for name, _ in found), "no old figures"
        connection.rollback()
    wait_for(lambda: value(scraped(http), "custody_up") == 1, "the database answers again")


def test_two_servers_do_not_share_what_they_count(orders: custody.Custody, serve: Callable[..., Http]) -> None:
    first, second = serve(), serve()
    publish(first, 3)
    assert value(scraped(first), "custody_messages_published_total", topic="orders") == 3
    assert value(scraped(second), "custody_messages_published_total", topic="orders") is None


def test_it_stands_in_the_description(http_: Http) -> None:
    described = http_.get("/openapi.json").json["paths"]["/metrics"]["get"]
    assert list(described["responses"]["200"]["content"]) == ["text/plain"]
    assert "security" not in described, "a key is needed where keys are"


def test_no_series_tells_when_it_began(orders: custody.Custody, http_: Http) -> None:
    publish(http_, 1)
    assert not [name for name, _ in scraped(http_) if name.endswith("_created")]


def test_the_number_of_series_is_bounded(
    c: custody.Custody, http_: Http, monkeypatch: pytest.MonkeyPatch, db: psycopg.Connection
) -> None:
    monkeypatch.setattr(counting, "MOST_TOPICS", 3)
    monkeypatch.setattr(counting, "MOST_GROUPS", 4)
    monkeypatch.setattr(outbox_metrics, "MOST", 2)
    for number in range(6):
        c.create_topic(f"t{number}")
        c.create_group(f"t{number}", "g")
        http_.post("/messages", {"topic": f"t{number}", "payload": 1})
        lease = http_.get(f"/messages/t{number}?group=g").json["lease_id"]
        http_.post("/messages/nack", {"lease_id": lease, "requeue": False})
        http_.get(f"/{number}/nowhere")
        http_(f"M{number}", "/topics")
        write(connection=db, event_type="test", payload=number, destination=f"http://host{number}:1/")
    found = scraped(http_)

    def labels(name: str, label: str) -> set[str]:
        return {dict(given)[label] for of, given in found if of == name}

    for name in ("custody_messages_published_total", "custody_topic_messages", "custody_topic_appended_total"):
        assert labels(name, "topic") == {"t0", "t1", "t2", "(other)"}
        assert value(found, name, topic="(other)") == 3
    for name in ("custody_messages_received_total", "custody_messages_settled_total", "custody_messages_dead_total"):
        assert labels(name, "topic") - {"-"} == {"t0", "t1", "t2", "(other)"}
    assert value(found, "custody_messages_dead_total", topic="(other)", group="(other)") == 3
    assert labels("custody_group_dead", "topic") == {"t0", "t1", "t2", "t3", "(other)"}
    assert value(found, "custody_group_dead", topic="(other)", group="(other)") == 2
    assert value(found, "custody_group_oldest_unresolved_age_seconds", topic="(other)", group="(other)") == 0
    assert len(labels("custody_outbox_backlog", "destination")) == 3
    assert value(found, "custody_outbox_backlog", destination="(other)") == 4
    assert len(labels("custody_http_requests_total", "method")) <= 3
    assert not any("nowhere" in route for route in labels("custody_http_requests_total", "route"))
