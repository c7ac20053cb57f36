"""Topics, what they keep and how they grow, by either way."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.conformance.conftest import Fill, blocking, refused
from tests.conftest import Clock

import custody
from custody.errors import LeaseLost

pytestmark = pytest.mark.core


def test_a_topic_comes_back_as_it_was_made(c: custody.Custody, direct: custody.Custody) -> None:
    kept = custody.Retention(time="7d", size="10GB", segment_time="1h", segment_size="1MB")
    made = c.create_topic("orders", partitions=3, max_depth=1000, retention=kept)
    assert (made.name, made.partitions, made.max_depth, made.tails) == ("orders", 3, 1000, (0, 0, 0))
    assert made.retention is not None
    assert made.retention.columns() == kept.columns()
    assert made == c.topic("orders") == direct.topic("orders")
    assert c.topics() == [made]


def test_a_topic_with_priorities_has_lanes(c: custody.Custody, direct: custody.Custody) -> None:
    made = c.create_topic("orders", partitions=2, priorities=True, starvation_limit="5s")
    assert (made.partitions, made.priorities, made.starvation_limit) == (10, True, timedelta(seconds=5))
    assert made == direct.topic("orders")


def test_what_cannot_be_a_topic_is_refused(c: custody.Custody) -> None:
    c.create_topic("orders")
    with refused("topic_exists"):
        c.create_topic("orders")
    for name in ("", "a b", "a/b", "ü", "x" * 201):
        with refused("invalid_argument"):
            c.create_topic(name)
    with refused("invalid_argument"):
        c.create_topic("other", partitions=0)
    with refused("invalid_argument"):
        c.create_topic("other", max_depth=0)
    with refused("invalid_argument"):
        c.create_topic("other", starvation_limit="5s")
    assert [topic.name for topic in c.topics()] == ["orders"]


@pytest.mark.parametrize("name", ["nothing", "", "a/b", "..", "ü"])
def test_a_topic_that_is_not_there_is_not_found(c: custody.Custody, name: str) -> None:
    for ask in (
        lambda: c.topic(name),
        lambda: c.delete_topic(name),
        lambda: c.publish(name, 1),
        lambda: c.publish_many(name, []),
        lambda: c.read(name),
        lambda: c.groups(name),
        lambda: c.create_group(name, "g"),
        lambda: c.claim(name, "g"),
        lambda: c.delayed(name),
        lambda: c.delayed_count(name),
        lambda: c.segments(name),
        lambda: c.in_flight(name),
        lambda: c.stats(name, "g"),
        lambda: c.trace(name, 0, 0),
        lambda: c.set_retention(name, None),
        lambda: c.grow_topic(name, partitions=2),
    ):
        with refused("topic_not_found"):
            ask()


def test_a_deleted_topic_is_gone_with_its_groups(orders: custody.Custody) -> None:
    orders.delete_topic("orders")
    assert orders.topics() == []
    with refused("topic_not_found"):
        orders.group("orders", "stock")


def test_retention_is_changed_and_taken_back(c: custody.Custody) -> None:
    c.create_topic("orders")
    changed = c.set_retention("orders", custody.Retention(time="1d"))
    assert changed.retention is not None
    assert changed.retention.columns()["time"] == "86400.0 s"
    assert c.set_retention("orders", None).retention is None


def test_partitions_and_retention_are_changed_at_once(c: custody.Custody) -> None:
    c.create_topic("orders")
    changed = c.change_topic("orders", partitions=3, retention=custody.Retention(time="1d"))
    assert (changed.partitions, changed.retention) == (3, custody.Retention(time="1d", segment_time="8640s"))
    with refused("conflict"):
        c.change_topic("orders", partitions=2, retention=None)
    with refused("invalid_argument"):
        c.change_topic("orders")
    assert c.topic("orders") == changed, "all of it, or nothing"


def test_upkeep_drops_what_is_too_old(c: custody.Custody, clock: Clock) -> None:
    c.create_topic("orders", retention=custody.Retention(time="1h", segment_time="10m"))
    c.publish("orders", 1)
    clock.move(700)
    assert [(one.topic, one.did) for one in c.maintain("orders")] == [("orders", "sealed")]
    first, second = c.segments("orders")
    assert (first.messages, second.sealed_at) == (1, None)
    clock.move(4000)
    assert "dropped" in [one.did for one in c.maintain()]
    assert c.topic("orders").first_offsets == (1,)
    with refused("offset_out_of_range"):
        c.read("orders", offset=0)


def test_dead_letters_of_dropped_segments_are_kept_aside(c: custody.Custody, clock: Clock) -> None:
    c.create_topic("orders", retention=custody.Retention(time="1h", segment_time="10m"))
    c.create_group("orders", "g")
    c.publish("orders", {"n": 1})
    c.claim("orders", "g").nack(requeue=False)
    assert c.kept_aside("orders").events == 0
    clock.move(700)
    c.maintain("orders")
    clock.move(4000)
    c.maintain("orders")
    assert c.kept_aside("orders").events == 1
    assert [letter.payload for letter in c.dead("orders", "g")] == [{"n": 1}]


def test_a_group_that_holds_a_segment_is_named(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    orders.set_retention("orders", custody.Retention(time="1h", segment_time="10m"))
    fill(2)
    clock.move(700)
    orders.maintain("orders")
    clock.move(4000)
    held = [one for one in orders.maintain("orders") if one.did == "held"]
    assert [(one.held_group, one.held_partition, one.held_offset) for one in held] == [("stock", 0, 0)]


def test_the_journal_keeps_what_it_is_told(c: custody.Custody) -> None:
    assert (c.journal().keep_time, c.journal().keep_size) == (None, None)
    assert c.set_journal_retention(time="90d", size="1GB") == c.journal()
    assert (c.journal().keep_time, c.journal().keep_size) == (timedelta(days=90), 2**30)
    assert [part.sealed_at for part in c.journal().parts] == [None]
    with refused("invalid_argument"):
        c.set_journal_retention(time="0s")


def test_a_topic_grows_where_no_key_can_lose_its_order(orders: custody.Custody, fill: Fill) -> None:
    fill(1)
    with refused("conflict") as why:
        orders.grow_topic("orders", partitions=4)
    assert "stock" in str(why[0])
    orders.claim("orders", "stock").ack()
    assert orders.grow_topic("orders", partitions=4).partitions == 4
    assert {receipt.partition for receipt in fill(200, keys=100)} == {0, 1, 2, 3}


@blocking
def test_the_server_says_what_it_is(c: custody.Custody, direct: custody.Custody) -> None:
    assert c.server() == direct.server()
    c.ping()


def test_a_lost_lease_is_the_same_class(orders: custody.Custody, fill: Fill) -> None:
    fill(1)
    lease = orders.claim("orders", "stock")
    lease.release()
    with pytest.raises(LeaseLost):
        lease.ack()
