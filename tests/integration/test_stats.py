"""The figures of a group: each message is counted in exactly one of them."""

from __future__ import annotations

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, fill, offsets, start

from custody import Constant, Custody, Outcome, Outgoing, Policy
from custody.errors import GroupNotFound, TopicNotFound

pytestmark = pytest.mark.core


@pytest.mark.req("C8")
def test_a_new_group_only_lags(c: Custody, clock: Clock) -> None:
    begin = clock.time
    start(c, 7)
    clock.move(60)
    stats = c.stats(TOPIC, GROUP)
    assert (stats.topic, stats.group, stats.lag, stats.depth, stats.tail) == (TOPIC, GROUP, 7, 7, (7,))
    assert (stats.waiting, stats.in_flight, stats.holes, stats.parked, stats.dead) == (0, 0, 0, 0, 0)
    assert stats.oldest_unresolved == begin
    assert (stats.paused_at, stats.paused_reason) == (None, None)


@pytest.mark.req("C8")
def test_a_group_that_has_caught_up_has_nothing(c: Custody) -> None:
    start(c, 7)
    drain(c)
    stats = c.stats(TOPIC, GROUP)
    assert (stats.lag, stats.depth, stats.oldest_unresolved, stats.tail) == (0, 0, None, (7,))


@pytest.mark.req("C8", "C6")
def test_each_message_is_counted_once(c: Custody) -> None:
    start(c, policy=Policy(ordering="key", on_dead="hold"), keys="abcdefghijaz")
    lease = c.claim(TOPIC, GROUP, max_messages=10)
    c.settle(
        lease.lease_id,
        {
            0: Outcome("nack"),
            1: Outcome("ack"),
            2: Outcome("dead"),
            3: Outcome("ack"),
            4: Outcome("later", delay="1h"),
            5: Outcome("ack"),
            6: Outcome("release"),
        },
    )
    c.extend(lease.lease_id, "1h")
    other = c.claim(TOPIC, GROUP)
    assert offsets(other) == [6]
    fresh = c.claim(TOPIC, GROUP)
    assert offsets(fresh) == [11], "the second a was parked on the way"
    fill(c, 2)
    stats = c.stats(TOPIC, GROUP)
    assert (stats.lag, stats.waiting, stats.in_flight, stats.parked, stats.dead) == (2, 2, 5, 1, 1)
    assert stats.depth == 2 + 2 + 5 + 1 + 1, "a held dead message is not resolved"
    assert stats.holes == 3, "0, 2 and 4; what reaches up to the frontier is no gap"
    (partition,) = stats.partitions
    assert (partition.first_offset, partition.tail, partition.frontier, partition.oldest_unresolved) == (0, 14, 12, 0)


@pytest.mark.req("C8", "C2")
def test_an_expired_lease_counts_as_waiting_before_it_is_folded(c: Custody, clock: Clock) -> None:
    start(c, 5)
    c.claim(TOPIC, GROUP, max_messages=3)
    clock.move(30)
    stats = c.stats(TOPIC, GROUP)
    assert (stats.in_flight, stats.waiting, stats.lag, stats.depth) == (0, 3, 2, 5)
    c.claim(TOPIC, GROUP)
    stats = c.stats(TOPIC, GROUP)
    assert (stats.in_flight, stats.waiting, stats.lag, stats.depth) == (1, 2, 2, 5)


@pytest.mark.req("C8")
def test_dead_letters_are_counted_and_are_resolved(c: Custody) -> None:
    start(c, 3, Policy(max_attempts=1))
    c.claim(TOPIC, GROUP, max_messages=2).nack()
    c.claim(TOPIC, GROUP).ack()
    stats = c.stats(TOPIC, GROUP)
    assert (stats.dead, stats.depth, stats.holes, stats.oldest_unresolved) == (2, 0, 0, None)


@pytest.mark.req("C8")
def test_the_oldest_unresolved_moves_as_messages_are_settled(c: Custody, clock: Clock) -> None:
    start(c)
    times = []
    for n in range(4):
        c.publish(TOPIC, n)
        times.append(clock.time)
        clock.move(10)
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    seen = [c.stats(TOPIC, GROUP).oldest_unresolved]
    for message in lease:
        lease.ack(message)
        seen.append(c.stats(TOPIC, GROUP).oldest_unresolved)
    assert seen == times


@pytest.mark.req("C8")
def test_partitions_are_counted_apart_and_together(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic(TOPIC, partitions=3)
    c.create_group(TOPIC, GROUP, Policy(backoff=Constant("1h")))
    c.publish_many(TOPIC, [Outgoing(n, partition=n % 2) for n in range(10)])
    c.claim(TOPIC, GROUP, partition=0, max_messages=2).nack()
    c.claim(TOPIC, GROUP, partition=1, max_messages=3)
    stats = c.stats(TOPIC, GROUP)
    assert [(p.partition, p.lag, p.waiting, p.in_flight) for p in stats.partitions] == [
        (0, 3, 2, 0),
        (1, 2, 0, 3),
        (2, 0, 0, 0),
    ]
    assert (stats.lag, stats.waiting, stats.in_flight, stats.depth, stats.tail) == (5, 2, 3, 10, (5, 5, 0))


@pytest.mark.req("C8")
def test_rewound_messages_wait(c: Custody) -> None:
    start(c, 6)
    drain(c)
    c.rewind(TOPIC, GROUP, to_offset=2)
    stats = c.stats(TOPIC, GROUP)
    assert (stats.lag, stats.waiting, stats.depth) == (0, 4, 4)


@pytest.mark.req("C8", "V7")
def test_a_kept_dead_letter_that_is_held_is_still_dated(c: Custody, db: psycopg.Connection, clock: Clock) -> None:
    start(c, policy=Policy(max_attempts=1), keys="a")
    begin = clock.time
    c.claim(TOPIC, GROUP).nack()
    db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    db.execute("SELECT * FROM custody.drop_segments(%s)", [TOPIC])
    c.redrive(TOPIC, GROUP)
    assert c.stats(TOPIC, GROUP).oldest_unresolved == begin


@pytest.mark.req("G20")
def test_an_unknown_group_is_an_error(c: Custody) -> None:
    start(c)
    with pytest.raises(GroupNotFound, match="has no group 'stok'"):
        c.stats(TOPIC, "stok")
    with pytest.raises(TopicNotFound):
        c.stats("ordres", GROUP)
