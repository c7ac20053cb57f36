"""Topics and groups that a program makes sure of at each start, by either way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from tests.conformance.conftest import Fill, refused
from tests.integration.stream import everything

import custody
from custody import Binding, Constant, Policy, Retention

pytestmark = pytest.mark.core


def test_what_is_missing_is_created(c: custody.Custody, direct: custody.Custody) -> None:
    topic = c.ensure_topic("orders", partitions=3, max_depth=9, retention=Retention(time="7d"))
    assert (topic.partitions, topic.max_depth, topic.priorities) == (3, 9, False)
    group = c.ensure_group("orders", "stock", Policy(ordering="key"), start="latest", bindings=["orders.>"])
    assert (group.policy and group.policy.ordering, group.bindings) == ("key", (Binding("orders.>"),))
    assert (c.ensure_topic("plain").partitions, c.ensure_group("plain", "bare", bare=True).bare) == (1, True)
    assert (topic, group) == (direct.topic("orders"), direct.group("orders", "stock"))


def test_a_second_time_changes_nothing(c: custody.Custody, direct: custody.Custody, db: psycopg.Connection) -> None:
    settings: list[tuple[str, dict[str, Any]]] = [
        ("orders", {"partitions": 3, "max_depth": 9, "retention": Retention(time="7d", size="1GB")}),
        ("lanes", {"partitions": 2, "priorities": True, "starvation_limit": "5s"}),
    ]
    policy = Policy(ordering="key", backoff=Constant("2s"), max_in_flight=5)
    for _ in range(2):
        topics = [c.ensure_topic(name, **given) for name, given in settings]
        groups = [
            c.ensure_group("orders", "stock", policy, bindings=["orders.*", Binding(headers={"region": "eu"})]),
            c.ensure_group("orders", "all", bindings=None),
        ]
        before = everything(db)
    assert [c.ensure_topic(name) for name, _ in settings] == topics
    assert [c.ensure_group("orders", name) for name in ("stock", "all")] == groups
    assert everything(db) == before


def test_what_can_be_changed_is_changed(c: custody.Custody, fill: Fill) -> None:
    c.create_topic("orders")
    c.create_group("orders", "stock")
    fill(4)
    c.ensure_topic("orders", retention=Retention(size="1GB"))
    changed = c.ensure_topic("orders", partitions=3, retention=Retention(time="1d"))
    assert changed.partitions == 3
    assert changed.retention is not None
    assert Retention(time="1d").holds_in(changed.retention)
    assert changed.message_count == 4
    policy = Policy(max_attempts=9)
    group = c.ensure_group("orders", "stock", policy, start="latest", bindings=["orders.>"])
    assert group.policy is not None
    assert (group.policy.max_attempts, group.bindings) == (9, (Binding("orders.>"),))
    assert c.ensure_group("orders", "stock", bindings=None).bindings == ()
    assert len(c.claim("orders", "stock", max_messages=10)) == 4, "the group stayed where it was"


def test_what_cannot_be_changed_is_refused_by_name(c: custody.Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders", partitions=3, max_depth=9)
    c.create_topic("lanes", partitions=2, priorities=True)
    c.create_group("orders", "stock", Policy(ordering="key"))
    c.create_group("orders", "bare", bare=True)
    before = everything(db)
    differences: list[tuple[str, Callable[[], object]]] = [
        (
            "partitions 3, not 2; max_depth 9, not 8",
            lambda: c.ensure_topic("orders", partitions=2, max_depth=8, retention=Retention(time="1d")),
        ),
        ("priorities False, not True", lambda: c.ensure_topic("orders", priorities=True)),
        ("partitions 2, not 3", lambda: c.ensure_topic("lanes", partitions=3)),
        ("ordering 'key', not 'none'", lambda: c.ensure_group("orders", "stock", Policy())),
        ("bare True, not False", lambda: c.ensure_group("orders", "bare", Policy())),
    ]
    for difference, ensure in differences:
        with refused("settings_differ") as found:
            ensure()
        assert found[0].message.endswith(f"exists with other settings: {difference}")
    assert everything(db) == before


def test_a_topic_whose_keys_would_move_does_not_grow(c: custody.Custody) -> None:
    c.ensure_topic("orders")
    c.ensure_group("orders", "stock", Policy(ordering="key"))
    c.publish("orders", 1, key="a")
    with refused("conflict"):
        c.ensure_topic("orders", partitions=2)


def test_many_at_once_make_one(c: custody.Custody) -> None:
    made: list[tuple[custody.Topic, custody.Group]] = []
    begin = threading.Barrier(4)

    def start() -> None:
        begin.wait()
        made.append((c.ensure_topic("orders", partitions=2), c.ensure_group("orders", "stock", Policy(max_attempts=2))))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [(c.topic("orders"), c.group("orders", "stock"))] * 4
