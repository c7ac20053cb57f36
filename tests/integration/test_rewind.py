"""Rewind: from an offset or a time on everything is delivered again; leases over it are revoked, cases there closed."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, fill, offsets, start

from custody import Constant, Custody, LeaseLost, Policy
from custody.errors import GroupNotFound, InvalidArgument, OffsetOutOfRange, PartitionNotFound

pytestmark = pytest.mark.core


@pytest.mark.req("V9")
def test_done_messages_are_delivered_again_as_if_for_the_first_time(c: Custody) -> None:
    start(c, 10)
    drain(c)
    (rewound,) = c.rewind(TOPIC, GROUP, to_offset=4)
    assert (rewound.partition, rewound.target, rewound.messages) == (0, 4, 6)
    assert [(m.offset, m.attempt, m.headers) for m in drain(c)] == [(n, 1, {}) for n in range(4, 10)]
    assert drain(c) == []


@pytest.mark.req("V9")
def test_a_rewind_to_a_time(c: Custody, clock: Clock) -> None:
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP)
    begin = clock.time
    for n in range(10):
        c.publish(TOPIC, n, partition=n % 2)
        clock.move(60)
    drain(c)
    rewound = c.rewind(TOPIC, GROUP, to_time=begin + timedelta(minutes=6))
    assert [(each.partition, each.target, each.messages) for each in rewound] == [(0, 3, 2), (1, 3, 2)]
    assert sorted(m.payload for m in drain(c)) == [6, 7, 8, 9]
    assert [each.messages for each in c.rewind(TOPIC, GROUP, to_time=clock.time)] == [0, 0]
    assert sum(each.messages for each in c.rewind(TOPIC, GROUP, to_time=begin - timedelta(days=9))) == 10


@pytest.mark.req("V9", "G14")
def test_leases_over_the_range_are_revoked(c: Custody) -> None:
    start(c, 10)
    whole = c.claim(TOPIC, GROUP, max_messages=4)
    partly = c.claim(TOPIC, GROUP, max_messages=4)
    c.rewind(TOPIC, GROUP, to_offset=6)
    assert whole.ack().settled == 4
    with pytest.raises(LeaseLost) as lost:
        partly.ack(partly.messages)
    assert lost.value.lost == (6, 7)
    assert [(m.offset, m.attempt) for m in drain(c)] == [(n, 1) for n in range(6, 10)]
    assert c.stats(TOPIC, GROUP).depth == 0


@pytest.mark.req("V9")
def test_open_cases_dead_letters_and_returned_messages_there_are_closed(c: Custody, clock: Clock) -> None:
    start(c, 30, Policy(max_attempts=2, backoff=Constant("1h")))
    lease = c.claim(TOPIC, GROUP, max_messages=20)
    lease.nack(lease.messages[3], lease.messages[13])
    lease.nack(lease.messages[4], lease.messages[14], requeue=False)
    lease.release(lease.messages[5], lease.messages[15])
    lease.ack(lease.messages[6], lease.messages[16])
    clock.move(30)  # the rest has expired
    c.rewind(TOPIC, GROUP, to_offset=10)
    assert offsets(c.dead(TOPIC, GROUP)) == [4]
    found = drain(c)
    assert sorted(offsets(found)) == sorted(set(range(30)) - {3, 4, 6})
    assert {m.offset: m.attempt for m in found if m.offset in (0, 5, 13, 14, 19, 25)} == {
        0: 2,
        5: 1,
        13: 1,
        14: 1,
        19: 1,
        25: 1,
    }
    stats = c.stats(TOPIC, GROUP)
    assert (stats.waiting, stats.depth, stats.dead) == (1, 1, 1)


@pytest.mark.req("V9")
def test_a_rewound_message_has_a_fresh_budget(c: Custody) -> None:
    start(c, 1, Policy(max_attempts=2, backoff=Constant(0)))
    c.claim(TOPIC, GROUP).nack()
    c.rewind(TOPIC, GROUP, to_offset=0)
    assert c.claim(TOPIC, GROUP).nack().dead == ()
    assert c.claim(TOPIC, GROUP).nack().dead == (0,)


@pytest.mark.req("V9")
def test_one_partition_may_be_rewound_alone(c: Custody) -> None:
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP)
    c.publish_many(TOPIC, list(range(10)))
    drain(c)
    assert [each.partition for each in c.rewind(TOPIC, GROUP, to_offset=2, partition=1)] == [1]
    assert [(m.partition, m.offset) for m in drain(c)] == [(1, 2), (1, 3), (1, 4)]


@pytest.mark.req("V9")
def test_a_dry_run_says_what_would_come_back(c: Custody, db: psycopg.Connection) -> None:
    start(c, 10)
    c.claim(TOPIC, GROUP, max_messages=5)
    before = everything(db)
    assert [each.messages for each in c.rewind(TOPIC, GROUP, to_offset=1, dry_run=True)] == [4]
    assert everything(db) == before


@pytest.mark.req("V9", "G20")
def test_a_rewind_that_cannot_be_is_refused(c: Custody, clock: Clock, db: psycopg.Connection) -> None:
    start(c, 10)
    c.claim(TOPIC, GROUP, max_messages=5).ack()
    before = everything(db)
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (InvalidArgument, {}),
        (InvalidArgument, {"to_offset": 1, "to_time": clock.time}),
        (InvalidArgument, {"to_time": datetime(2030, 1, 1)}),
        (OffsetOutOfRange, {"to_offset": -1}),
        (OffsetOutOfRange, {"to_offset": 6, "partition": 0}),
        (PartitionNotFound, {"to_offset": 1, "partition": 3}),
    ]
    for error, arguments in wrong:
        with pytest.raises(error):
            c.rewind(TOPIC, GROUP, **arguments)
    with pytest.raises(GroupNotFound):
        c.rewind(TOPIC, "nobody", to_offset=0)
    assert everything(db) == before


@pytest.mark.req("V9", "V3")
def test_the_journal_has_who_and_why(c: Custody) -> None:
    start(c, 3)
    drain(c)
    c.rewind(TOPIC, GROUP, to_offset=1, reason="the report was wrong")
    entry = c.trace(TOPIC, 0, 2)[-1]
    assert (entry.kind, entry.worker, entry.error) == ("rewind", "test", "the report was wrong")
    assert c.trace(TOPIC, 0, 0)[-1].kind == "ack"


@pytest.mark.req("V9")
def test_a_rewind_goes_before_the_start_of_the_group(c: Custody) -> None:
    c.create_topic(TOPIC)
    fill(c, 5)
    c.create_group(TOPIC, GROUP, start="latest")
    c.rewind(TOPIC, GROUP, to_offset=2)
    assert offsets(drain(c)) == [2, 3, 4]


@pytest.mark.req("V9", "V13")
def test_a_rewind_below_the_first_offset_is_out_of_range(c: Custody, db: psycopg.Connection) -> None:
    start(c, 5)
    drain(c)
    db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    db.execute("SELECT * FROM custody.drop_segments(%s)", [TOPIC])
    fill(c, 2)
    drain(c)
    with pytest.raises(OffsetOutOfRange):
        c.rewind(TOPIC, GROUP, to_offset=3)
    c.rewind(TOPIC, GROUP, to_offset=5)
    assert offsets(drain(c)) == [5, 6]


@pytest.mark.req("V9")
def test_rewinding_twice_delivers_once(c: Custody) -> None:
    start(c, 6)
    drain(c)
    c.rewind(TOPIC, GROUP, to_offset=3)
    c.rewind(TOPIC, GROUP, to_offset=1)
    c.rewind(TOPIC, GROUP, to_offset=2)
    assert offsets(drain(c)) == [1, 2, 3, 4, 5]
