"""Publishing, delayed messages and reading, by either way."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.conformance.conftest import Fill, refused
from tests.conftest import Clock

import custody
from custody import Delayed, Outgoing, Receipt

pytestmark = pytest.mark.core

PAYLOADS: list[Any] = [
    None,
    True,
    0,
    -1.5,
    2**63,
    "",
    "plain, Grüße \u2028 \x00",
    b"",
    b"\x00\xff",
    [],
    [1, [None, {"a": []}]],
    {},
    {"n": 1, "text": "ü", "deep": {"list": [1, 2.5, "x"]}},
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=repr)
def test_a_payload_comes_back_as_it_went_in(orders: custody.Custody, payload: Any) -> None:
    assert orders.publish("orders", payload) == Receipt("orders", 0, 0)
    (read,) = orders.read("orders")
    (claimed,) = orders.claim("orders", "stock")
    assert (read.payload, claimed.payload) == (payload, payload)
    assert type(read.payload) is type(claimed.payload) is type(payload)


def test_what_would_come_back_as_something_else_is_refused(orders: custody.Custody) -> None:
    for payload in (float("nan"), float("inf"), (1, 2), {1: 2}, {"t": {1, 2}}, object(), "\ud800"):
        with refused("invalid_payload"):
            orders.publish("orders", payload)
    for rest in (
        {"key": "a\0b"},
        {"key": 7},
        {"headers": {"n": 1}},
        {"headers": {"n": "\0"}},
        {"routing_key": "a..b"},
        {"headers": {"x-custody-routing-key": "*"}},
    ):
        with refused("invalid_payload"):
            orders.publish("orders", 1, **rest)  # type: ignore[call-overload]
    assert orders.topic("orders").message_count == 0


def test_a_message_has_what_it_was_published_with(orders: custody.Custody, direct: custody.Custody) -> None:
    orders.publish("orders", {"n": 1}, key="k", headers={"trace": "ü\n"}, routing_key="eu.new")
    (message,) = orders.read("orders")
    assert (message.key, message.routing_key, message.headers["trace"]) == ("k", "eu.new", "ü\n")
    assert (message.attempt, message.published_at.tzinfo is not None) == (0, True)
    assert [message] == direct.read("orders")


def test_a_batch_is_all_or_nothing_and_in_order(c: custody.Custody) -> None:
    c.create_topic("orders", partitions=2)
    receipts = c.publish_many("orders", [Outgoing(n, partition=n % 2) for n in range(10)])
    assert [(one.partition, one.offset) for one in receipts] == [(n % 2, n // 2) for n in range(10)]
    assert [message.payload for message in c.read("orders", 1)] == [1, 3, 5, 7, 9]
    with refused("invalid_payload"):
        c.publish_many("orders", [1, 2, float("nan")])
    with refused("partition_not_found"):
        c.publish_many("orders", [Outgoing(1, partition=0), Outgoing(2, partition=7)])
    assert c.topic("orders").tails == (5, 5)
    assert c.publish_many("orders", []) == []


def test_a_large_batch_goes_through_whole(c: custody.Custody) -> None:
    c.create_topic("orders")
    receipts = c.publish_many("orders", range(3000))
    assert [one.offset for one in receipts] == list(range(3000))
    assert [message.payload for message in c.read("orders", max_messages=3000)] == list(range(3000))


def test_a_key_has_one_partition(c: custody.Custody, direct: custody.Custody) -> None:
    c.create_topic("orders", partitions=8)
    mine = {key: c.publish("orders", 1, key=key).partition for key in map(str, range(20))}
    assert mine == {key: direct.publish("orders", 1, key=key).partition for key in mine}


def test_a_partition_that_is_not_there_is_not_found(c: custody.Custody) -> None:
    c.create_topic("orders")
    for partition in (1, -1):
        with refused("partition_not_found"):
            c.publish("orders", 1, partition=partition)
        with refused("partition_not_found"):
            c.read("orders", partition)


def test_an_expected_offset_is_checked(c: custody.Custody) -> None:
    c.create_topic("orders")
    assert c.publish("orders", 1, expected_offset=0) == Receipt("orders", 0, 0)
    with refused("offset_conflict"):
        c.publish("orders", 2, expected_offset=0)
    assert c.publish("orders", 2, expected_offset=1).offset == 1
    with refused("invalid_argument"):
        c.publish("orders", 3, delay="1s", expected_offset=2)  # type: ignore[call-overload]


def test_a_full_topic_refuses(c: custody.Custody) -> None:
    c.create_topic("orders", max_depth=2)
    c.create_group("orders", "g")
    c.publish_many("orders", [1, 2])
    with refused("queue_full"):
        c.publish("orders", 3)
    c.claim("orders", "g").ack()
    assert c.publish("orders", 3).offset == 2


@pytest.mark.req("G16")
def test_priorities_are_kept_and_checked(c: custody.Custody) -> None:
    c.create_topic("orders", priorities=True)
    c.create_topic("plain")
    c.create_group("orders", "g")
    c.publish("orders", "slow", priority="background")
    c.publish("orders", "quick", priority="critical")
    claimed = [*c.claim("orders", "g"), *c.claim("orders", "g")]  # by weight, so in any order
    assert {(m.payload, m.priority) for m in claimed} == {("quick", "critical"), ("slow", "background")}
    assert c.read("orders", 4)[0].priority == "background"
    with refused("no_priorities"):
        c.publish("plain", 1, priority="high")
    for wrong in ({"priority": "urgent"}, {"priority": "high", "partition": 0}):
        with refused("invalid_argument"):
            c.publish("orders", 1, **wrong)  # type: ignore[call-overload]


@pytest.mark.req("G15")
def test_a_delayed_message_waits_and_comes(orders: custody.Custody, clock: Clock) -> None:
    due = clock() + timedelta(seconds=30)
    given = orders.publish("orders", {"n": 1}, key="k", headers={"a": "b"}, delay="30s")
    assert given == Delayed(topic="orders", partition=0, delay_id=given.delay_id, deliver_at=due)
    later = orders.publish("orders", b"\xff", deliver_at=due + timedelta(seconds=1))
    first, second = orders.delayed("orders")
    assert (first.delay_id, first.key, first.payload, first.headers) == (given.delay_id, "k", {"n": 1}, {"a": "b"})
    assert (second.delay_id, second.payload, second.deliver_at) == (later.delay_id, b"\xff", later.deliver_at)
    assert [one.key for one in orders.delayed("orders", key="k")] == ["k"]
    assert len(orders.delayed("orders", limit=1)) == 1
    assert orders.delayed_count("orders") == 2
    assert orders.claim("orders", "stock").reason == "empty"
    assert orders.next_due("orders", "stock") == pytest.approx(30)
    clock.move(30)
    assert [message.payload for message in orders.claim("orders", "stock", max_messages=9)] == [{"n": 1}]
    orders.cancel_delayed("orders", later.delay_id)
    assert orders.delayed_count("orders") == 0
    for gone in (later.delay_id, given.delay_id, 12345):
        with refused("delay_not_found"):
            orders.cancel_delayed("orders", gone)


def test_delays_that_mean_nothing_are_refused(orders: custody.Custody, clock: Clock) -> None:
    for wrong in (
        {"delay": "soon"},
        {"delay": -1},
        {"delay": "1s", "deliver_at": clock()},
        {"deliver_at": datetime(2030, 1, 1)},
    ):
        with refused("invalid_argument"):
            orders.publish("orders", 1, **wrong)  # type: ignore[call-overload]
    with refused("invalid_argument"):
        orders.publish_many("orders", [Outgoing(1, delay="1s")])
    with refused("invalid_argument"):
        orders.publish_delayed("orders", [Outgoing(1)])
    assert orders.publish_delayed("orders", []) == []


def test_reading_starts_at_an_offset_or_a_time(c: custody.Custody, clock: Clock) -> None:
    c.create_topic("orders")
    for n in range(5):
        c.publish("orders", n)
        clock.move(60)
    start = clock() - timedelta(seconds=130)
    assert [message.payload for message in c.read("orders", offset=3)] == [3, 4]
    assert [message.payload for message in c.read("orders", time=start)] == [3, 4]
    assert [message.payload for message in c.read("orders", max_messages=2)] == [0, 1]
    assert c.read("orders", offset=5) == []
    with refused("invalid_argument"):
        c.read("orders", offset=1, time=start)
    with refused("invalid_argument"):
        c.read("orders", time=datetime(2030, 1, 1))


def test_nothing_is_left_of_a_client_that_is_closed(
    c: custody.Custody, fill: Fill, orders: custody.Custody, db: Any
) -> None:
    fill(3)
    c.publish("orders", 4, delay="1s")
    c.close()
    assert db.execute("SELECT count(*) FROM custody.producers").fetchone() == (0,)
