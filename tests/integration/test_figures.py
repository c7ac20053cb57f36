"""The figures of all groups at once are those of each group."""

from __future__ import annotations

import threading

import psycopg
import pytest
from tests.conftest import Clock

from custody import Breaker, Constant, Custody, Outcome, Outgoing, Policy
from custody.errors import Busy

pytestmark = [pytest.mark.core, pytest.mark.req("G18")]

FIELDS = ("lag", "waiting", "in_flight", "holes", "parked", "dead", "depth")


def trouble(c: Custody, topic: str, group: str, policy: Policy) -> None:
    """Some of everything that can become of a message, on several partitions."""
    c.create_group(topic, group, policy)
    for partition in range(2):
        lease = c.claim(topic, group, max_messages=12, partition=partition)
        kinds = ["nack", "ack", "dead", "ack", "later", "release", "ack"]
        named = [message.offset for message in lease.messages][: len(kinds)]
        outcomes = zip(named, kinds, strict=True)
        c.settle(lease.lease_id, {at: Outcome(kind, delay="1h") for at, kind in outcomes})  # type: ignore[arg-type]
    for _ in range(2):  # what was given back, and then what comes behind the keys that wait
        c.claim(topic, group, max_messages=12, partition=0, visibility_timeout="1h")
    short = c.claim(topic, group, max_messages=5, partition=2, visibility_timeout="1s")
    assert short


def assert_same(c: Custody, now: Clock) -> None:
    _, groups, _ = c.overview()
    assert groups
    for one in groups:
        stats = c.stats(one.topic, one.group)
        assert {name: getattr(one, name) for name in FIELDS} == {name: getattr(stats, name) for name in FIELDS}
        oldest = stats.oldest_unresolved
        assert one.oldest_unresolved_age == (None if oldest is None else (now() - oldest).total_seconds())
        assert one.paused == (stats.paused_at is not None)
        assert one.breaker == stats.breaker
        assert one.bound == stats.bound == bool(c.group(one.topic, one.group).bindings)


def test_all_groups_at_once_are_as_each_by_itself(c: Custody, clock: Clock) -> None:
    for topic in ("orders", "invoices"):
        c.create_topic(topic, partitions=3)
        clock.move(10)
        c.publish_many(
            topic, [Outgoing(n, key=f"k{n // 3 % 12}", partition=n % 3, allow_split=True) for n in range(120)]
        )
        trouble(c, topic, "plain", Policy(backoff=Constant("1h")))
        trouble(c, topic, "ordered", Policy(ordering="key", on_dead="hold", backoff=Constant("1h")))
        c.create_group(topic, "bare", bare=True)
        c.commit(topic, "bare", 0, 4)
    c.create_topic("empty")
    c.create_group("empty", "idle")
    c.pause("orders", "plain", reason="a test")
    clock.move(20)  # some of the leases have expired by now
    assert_same(c, clock)
    _, groups, _ = c.overview()
    found = {(one.topic, one.group): one for one in groups}
    assert [one for one in found if one[0] == "empty"] == [("empty", "idle")]
    ordered = found["orders", "ordered"]
    assert all(getattr(ordered, name) > 0 for name in FIELDS), f"the test has something of everything: {ordered}"
    assert found["empty", "idle"].oldest_unresolved_age is None
    assert [found["orders", name].paused for name in ("plain", "ordered")] == [True, False]


def test_a_gap_of_parked_messages_is_no_hole(c: Custody, clock: Clock) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", Policy(ordering="key", backoff=Constant("1h")))
    c.publish_many("orders", [Outgoing(n, key=key) for n, key in enumerate("abcaz")])
    first = c.claim("orders", "g", max_messages=3)
    first.nack(first.messages[0])
    first.ack()
    second = c.claim("orders", "g", max_messages=3)
    assert [message.key for message in second.messages] == ["z"], "the second a waits behind the first"
    second.ack()
    c.publish("orders", "the last")
    c.claim("orders", "g").ack()
    (found,) = c.overview()[1]
    assert (found.waiting, found.parked, found.holes) == (1, 1, 1)
    assert_same(c, clock)


@pytest.mark.req("V11")
def test_the_figures_of_a_bound_group_say_that_it_is_bound(c: Custody, clock: Clock) -> None:
    """They include what it has not looked at yet; when it has looked at everything, they are exact."""
    c.create_topic("orders")
    c.create_group("orders", "g", bindings=["orders.eu.>"])
    c.create_group("orders", "all")
    c.publish_many("orders", [Outgoing(n, routing_key="orders.us.new") for n in range(9)])
    assert (c.stats("orders", "g").bound, c.stats("orders", "g").lag) == (True, 9)
    assert not c.stats("orders", "all").bound
    assert (c.figures("orders", "g").bound, c.figures("orders", "all").bound) == (True, False)
    assert_same(c, clock)
    assert not c.claim("orders", "g")
    assert (c.stats("orders", "g").lag, c.stats("orders", "g").depth) == (0, 0)
    c.bind("orders", "g", [])
    assert not c.stats("orders", "g").bound


def test_the_state_of_a_breaker_is_told(c: Custody) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", Policy(breaker=Breaker(min_outcomes=2)))
    c.create_group("orders", "none", Policy(breaker=None))
    c.publish_many("orders", range(4))

    def breaker(group: str) -> str | None:
        return next(one.breaker for one in c.overview()[1] if one.group == group)

    assert (breaker("g"), breaker("none")) == ("closed", None)
    lease = c.claim("orders", "g", max_messages=4)
    lease.nack(error="down")
    assert breaker("g") == "open"


def test_topics_count_what_they_hold_and_what_they_ever_got(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders", partitions=2)
    c.create_topic("empty")
    c.publish_many("orders", range(10))
    db.execute("SELECT custody.seal_segment('orders')")
    db.execute("SELECT custody.drop_segments('orders')")
    c.publish_many("orders", range(3))
    topics, _, _ = c.overview()
    assert [(one.topic, one.partitions, one.messages, one.appended) for one in topics] == [
        ("empty", 1, 0, 0),
        ("orders", 2, 3, 13),
    ]


def test_a_database_that_does_not_answer_in_time_is_given_up(c: Custody, db: psycopg.Connection) -> None:
    with db.transaction():
        db.execute("LOCK TABLE custody.groups IN ACCESS EXCLUSIVE MODE")
        done = threading.Event()
        raised: list[BaseException] = []

        def look() -> None:
            try:
                c.overview(timeout=0.2)
            except Busy as error:
                raised.append(error)
            done.set()

        threading.Thread(target=look, daemon=True).start()
        assert done.wait(10), "it waits for ever"
    assert raised
    assert c.overview()[1] == []
