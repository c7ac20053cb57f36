"""A topic gets more partitions: keys keep their order, or it is refused; everybody finds the new ones."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything
from tests.waiting import wait_for

import custody
from custody import Custody, Outgoing, Policy, Retention
from custody.errors import Conflict, InvalidArgument, KeysMoved, TopicNotFound
from custody.model.placement import partition_for

pytestmark = pytest.mark.core

KEYS = [f"key-{n}" for n in range(20)]


def publish(c: Custody, count: int = 1) -> None:
    c.publish_many(TOPIC, [Outgoing(n, key=key) for n in range(count) for key in KEYS])


@pytest.mark.req("V13")
def test_keys_go_to_their_new_partitions_and_everything_is_delivered_in_order(c: Custody) -> None:
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP, Policy(ordering="key"))
    publish(c, 3)
    assert len(drain(c)) == 60
    assert c.grow_topic(TOPIC, partitions=5).partitions == 5
    assert c.topic(TOPIC).tails[2:] == (0, 0, 0)
    publish(c, 3)
    seen = drain(c, max_messages=7)
    assert len(seen) == 60
    assert {message.partition for message in seen} == {partition_for(key, 5) for key in KEYS}
    for key in KEYS:
        assert [message.payload for message in seen if message.key == key] == [0, 1, 2]
        assert {message.partition for message in seen if message.key == key} == {partition_for(key, 5)}
    stats = c.stats(TOPIC, GROUP)
    assert (stats.depth, len(stats.partitions)) == (0, 5)
    assert [entry.kind for entry in c.trace(TOPIC, 4, 0)] == ["claim", "ack"]


@pytest.mark.req("V13")
@pytest.mark.parametrize("how", ["fresh", "in flight", "waiting", "parked", "held"])
def test_it_is_refused_while_an_ordered_group_has_something_open(c: Custody, db: Any, how: str) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, "any")
    c.create_group(TOPIC, GROUP, Policy(ordering="key", on_dead="hold"))
    c.publish_many(TOPIC, [Outgoing(n, key="a") for n in range(2)])
    drain(c, group="any")
    if how != "fresh":
        lease = c.claim(TOPIC, GROUP, max_messages=1 if how == "parked" else 2)
        if how == "waiting":
            lease.nack()
        elif how == "parked":
            lease.nack()
            c.claim(TOPIC, GROUP)
        elif how == "held":
            lease.nack(lease.messages[0], requeue=False)
    before = everything(db)
    with pytest.raises(Conflict, match=rf"group '{GROUP}' .* ordered by key and has 2 unresolved messages"):
        c.grow_topic(TOPIC, partitions=2)
    assert everything(db) == before


@pytest.mark.req("V13")
def test_unordered_and_bare_groups_are_in_nobodys_way(c: Custody, clock: Clock) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP)
    c.create_group(TOPIC, "tail", bare=True)
    publish(c)
    lease = c.claim(TOPIC, GROUP, max_messages=5)
    c.grow_topic(TOPIC, partitions=3)
    publish(c)
    lease.ack()
    assert len(drain(c)) == 35
    assert sum(len(c.fetch(TOPIC, "tail", partition)) for partition in range(3)) == 40
    c.commit(TOPIC, "tail", 2, 1)


@pytest.mark.req("V13")
def test_segments_from_before_and_after_go_as_ever(c: Custody, clock: Clock) -> None:
    c.create_topic(TOPIC, partitions=1, retention=Retention(time="1h"))
    c.create_group(TOPIC, GROUP)
    publish(c)
    drain(c)
    clock.move(3600)
    c.maintain()  # sealed with one partition
    publish(c)
    c.grow_topic(TOPIC, partitions=4)
    publish(c)
    drain(c)
    clock.move(3600)
    assert [one.did for one in c.maintain()] == ["sealed", "dropped"]
    assert c.topic(TOPIC).first_offsets == (20, 0, 0, 0)
    publish(c)
    clock.move(3600)
    assert [one.did for one in c.maintain()] == ["sealed", "dropped"]
    tails = c.topic(TOPIC).first_offsets
    assert sum(tails) == 60
    assert len(drain(c)) == 20
    assert sum(c.topic(TOPIC).tails) == 80


@pytest.mark.req("V13")
def test_new_groups_and_rewinds_know_the_new_partitions(c: Custody) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP)
    publish(c)
    c.grow_topic(TOPIC, partitions=2)
    publish(c)
    c.create_group(TOPIC, "late")
    assert len(drain(c, group="late")) == 40
    drain(c)
    assert sum(one.messages for one in c.rewind(TOPIC, GROUP, to_offset=0)) == 40
    assert len(drain(c)) == 40


@pytest.mark.req("V13")
def test_a_publisher_that_knew_the_old_number_places_anew(c: Custody, database_url: str) -> None:
    c.create_topic(TOPIC)
    publish(c)
    with custody.connect(database_url) as operator:
        operator.grow_topic(TOPIC, partitions=4)
    for count in (1, 100):  # small batches and those that go in by COPY
        receipts = c.publish_many(TOPIC, [Outgoing(n, key=KEYS[n % 20]) for n in range(count)])
        assert [r.partition for r in receipts] == [partition_for(KEYS[n % 20], 4) for n in range(count)]


@pytest.mark.req("V13")
def test_a_publisher_that_waited_for_the_growth_places_anew(c: Custody, database_url: str) -> None:
    """It had looked at the topic before, and holds its head only after: what counts is what the head says."""
    c.create_topic(TOPIC)
    publish(c)
    with psycopg.connect(database_url) as operator:
        operator.execute("SELECT custody.grow_topic(%s, 8)", [TOPIC])
        receipts: list[Any] = []
        waiting = threading.Thread(target=lambda: receipts.extend(c.publish_many(TOPIC, [Outgoing(1, key="key-1")])))
        waiting.start()
        blocked = "SELECT count(*) FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid))"
        wait_for(lambda: operator.execute(blocked).fetchone() == (1,), "nobody waits for the growth")
    waiting.join(10)
    assert [receipt.partition for receipt in receipts] == [partition_for("key-1", 8)]


@pytest.mark.req("V13")
def test_delayed_messages_move_with_their_keys(c: Custody, clock: Clock) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering="key"))
    for key in KEYS:
        c.publish(TOPIC, "delayed", key=key, delay="1h")
    c.grow_topic(TOPIC, partitions=8)
    publish(c)
    assert len(drain(c)) == 20
    clock.move(3600)
    seen = drain(c)
    assert {(m.key, m.partition) for m in seen} == {(key, partition_for(key, 8)) for key in KEYS}
    assert {m.payload for m in seen} == {"delayed"}


@pytest.mark.req("V13")
def test_an_idle_worker_finds_messages_of_a_new_partition(c: Custody, database_url: str) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering="key"))
    with custody.connect(database_url) as own:
        seen: list[int] = []
        worker = own.worker_for(TOPIC, GROUP, lambda message: seen.append(message.partition), poll="100ms")
        running = threading.Thread(target=worker.run)
        running.start()
        try:
            wait_for(lambda: worker.waiting_for == "empty", "the worker is not idle")
            c.grow_topic(TOPIC, partitions=8)
            publish(c)
            wait_for(lambda: len(seen) == 20, "the worker has not found everything")
        finally:
            worker.stop()
            running.join(10)
    assert set(seen) == {partition_for(key, 8) for key in KEYS}


@pytest.mark.req("V13")
def test_a_pipeline_claims_from_new_partitions_but_not_for_a_pass_that_began_before(c: Custody) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP)
    publish(c)
    drive, only = c.drive(TOPIC, GROUP)
    c.grow_topic(TOPIC, partitions=3)
    publish(c)
    assert drive.claim(1000, only).messages == 20
    drive.release()
    assert drive.claim(1000).messages == 40


def test_nonsense_is_refused_and_the_same_number_changes_nothing(c: Custody, db: Any) -> None:
    c.create_topic(TOPIC, partitions=3)
    before = everything(db)
    assert c.grow_topic(TOPIC, partitions=3).partitions == 3
    with pytest.raises(Conflict, match="cannot have fewer"):
        c.grow_topic(TOPIC, partitions=2)
    for number in (0, -1, 5000):
        with pytest.raises(InvalidArgument):
            c.grow_topic(TOPIC, partitions=number)
    with pytest.raises(TopicNotFound):
        c.grow_topic("nowhere", partitions=2)
    assert everything(db) == before


@pytest.mark.req("V11")
def test_a_bound_group_goes_on_in_the_new_partitions(c: Custody) -> None:
    c.create_topic("events")
    c.create_group("events", "g")
    c.bind("events", "g", ["in"])
    c.grow_topic("events", partitions=3)
    c.publish_many("events", [Outgoing(n, partition=n % 3, routing_key="in" if n < 6 else "out") for n in range(12)])
    seen = []
    while (lease := c.claim("events", "g", max_messages=10)) or lease.reason == "busy":
        seen += [message.payload for message in lease]
        if lease:
            lease.ack()
    assert sorted(seen) == list(range(6))


def moved_and_unmoved() -> tuple[str, str]:
    """A key that moves from partition 0 of one to another of four, and one that stays."""
    return next(k for k in KEYS if partition_for(k, 4) != 0), next(k for k in KEYS if partition_for(k, 4) == 0)


@pytest.mark.req("K2", "V13")
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_dead_message_whose_key_has_moved_is_not_redriven_beside_newer_ones(
    c: Custody, db: Any, dry_run: bool
) -> None:
    moved, unmoved = moved_and_unmoved()
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering="key", on_dead="release", dead_letter="topic"))
    c.create_group(TOPIC, "any")
    c.publish_many(TOPIC, [Outgoing("old", key=moved), Outgoing("old", key=unmoved), Outgoing("old")])
    for group in (GROUP, "any"):
        c.claim(TOPIC, group, max_messages=3).nack(requeue=False)
    c.grow_topic(TOPIC, partitions=4)
    c.publish_many(TOPIC, [Outgoing("new", key=moved), Outgoing("new", key=unmoved)])
    newer = c.claim(TOPIC, GROUP, partition=partition_for(moved, 4))
    before = everything(db)
    with pytest.raises(KeysMoved, match=rf"keys of 1 of these .* the first is {TOPIC}/0/0") as refused:
        c.redrive(TOPIC, GROUP, dry_run=dry_run)
    assert "discard it" in refused.value.remedy
    assert everything(db) == before
    assert len(c.redrive(TOPIC, GROUP, partition=0, offsets=[1, 2])) == 2, "those that are where they belong"
    assert len(c.redrive(TOPIC, "any")) == 3, "without order it does not matter"
    newer.ack()
    assert c.replay(f"{TOPIC}-dlq", 0, 0).partition == partition_for(moved, 4), "the remedy"
    assert [m.key for m in drain(c) if m.payload == "old"].count(moved) == 1
    assert c.dead(TOPIC, GROUP) == []


@pytest.mark.req("K2", "V13")
@pytest.mark.parametrize("by", ["offset", "partition", "time"])
def test_an_ordered_group_is_not_rewound_to_before_the_growth(c: Custody, db: Any, clock: Clock, by: str) -> None:
    moved, unmoved = moved_and_unmoved()
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering="key"))
    c.publish_many(TOPIC, [Outgoing("old", key=unmoved), Outgoing("old", key=moved), Outgoing("old", key=unmoved)])
    drain(c)
    start = clock()
    clock.move(60)
    c.grow_topic(TOPIC, partitions=4)
    grown = clock()
    publish(c)
    drain(c)
    back: dict[str, Any] = {
        "offset": {"to_offset": 0},
        "partition": {"to_offset": 1, "partition": 0},
        "time": {"to_time": start},
    }[by]
    before = everything(db)
    for dry_run in (True, False):
        with pytest.raises(KeysMoved, match=f"{TOPIC}/0 cannot be rewound to before offset 3: .* message 1 has moved"):
            c.rewind(TOPIC, GROUP, **back, dry_run=dry_run)
    assert everything(db) == before
    assert sum(one.messages for one in c.rewind(TOPIC, GROUP, to_offset=2, partition=0)) > 0, "no such key after it"
    assert sum(one.messages for one in c.rewind(TOPIC, GROUP, to_time=grown)) == 20
    assert len(drain(c)) == 21
