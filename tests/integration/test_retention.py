"""Segments are sealed and dropped; nothing unresolved goes, and dead letters stay until somebody discards them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, fill, keyed, offsets, start

from custody import Constant, Custody, Outgoing, Policy
from custody.errors import OffsetOutOfRange

pytestmark = pytest.mark.core


def seal(db: psycopg.Connection[Any], now: Any = None) -> None:
    db.execute("SELECT custody.seal_segment(%s, %s)", [TOPIC, now])


def drop(db: psycopg.Connection[Any], before: Any = "infinity") -> list[tuple[Any, ...]]:
    """(dropped, kept events, held by) of each segment that was looked at."""
    query = "SELECT dropped, kept_events, held_by FROM custody.drop_segments(%s, p_before => %s)"
    return db.execute(query, [TOPIC, before]).fetchall()


@pytest.mark.req("V13")
def test_a_resolved_segment_goes_with_its_table(c: Custody, db: psycopg.Connection) -> None:
    start(c, 5)
    drain(c)
    seal(db)
    fill(c, 3)
    assert drop(db) == [(True, 0, None)]
    assert (c.topic(TOPIC).first_offsets, c.topic(TOPIC).message_count) == ((5,), 3)
    tables = db.execute("SELECT count(*) FROM pg_class WHERE relname ~ '^log_[0-9]+$'").fetchone()
    assert tables == (1,)
    assert offsets(drain(c)) == [5, 6, 7]
    assert drop(db) == []


@pytest.mark.req("V13")
def test_the_open_segment_is_never_dropped(c: Custody, db: psycopg.Connection) -> None:
    start(c, 5)
    drain(c)
    assert drop(db) == []
    assert c.topic(TOPIC).message_count == 5


@pytest.mark.req("V13")
def test_only_segments_sealed_before_a_time_go(c: Custody, db: psycopg.Connection, clock: Clock) -> None:
    c.create_topic(TOPIC)
    for _ in range(3):
        fill(c, 2)
        seal(db, clock.time)
        clock.move(3600)
    assert drop(db, clock.time - timedelta(minutes=90)) == [(True, 0, None)] * 2
    assert c.topic(TOPIC).first_offsets == (4,)


@pytest.mark.req("V13")
@pytest.mark.parametrize("how", ["lag", "leased", "waiting", "parked", "returned", "held", "bare"])
def test_a_group_that_has_not_resolved_a_message_holds_its_segment_and_is_named(
    c: Custody, db: psycopg.Connection, how: str
) -> None:
    start(c, policy=Policy(ordering="key", on_dead="hold"), keys="aabcd")
    c.create_group(TOPIC, "other")
    if how == "bare":
        c.create_group(TOPIC, "tail", bare=True)
        c.commit(TOPIC, "tail", 0, 4)
    lease = c.claim(TOPIC, GROUP, max_messages=4 if how == "lag" else 5)
    if how == "waiting":
        lease.nack(lease.messages[4])
    elif how == "parked":
        lease.nack(lease.messages[0])
    elif how == "returned":
        lease.release(lease.messages[3])
    elif how == "held":
        lease.nack(lease.messages[0], requeue=False)
    if how == "leased":
        lease.ack(lease.messages[:4])
    else:
        lease.ack()
    drain(c, group="other")
    seal(db)
    fill(c, 1)
    held = {"lag": 4, "leased": 4, "waiting": 4, "parked": 0, "returned": 3, "held": 0, "bare": 4}[how]
    group = "tail" if how == "bare" else GROUP
    before = everything(db)
    assert drop(db) == [(False, 0, f"group {group}, partition 0, offset {held}")]
    assert everything(db) == before
    assert len(c.read(TOPIC)) == 6


@pytest.mark.req("V13")
def test_the_oldest_held_segment_keeps_the_later_ones(c: Custody, db: psycopg.Connection) -> None:
    start(c, 2)
    seal(db)
    fill(c, 2)
    c.claim(TOPIC, GROUP).ack()
    lease = c.claim(TOPIC, GROUP, max_messages=5)
    lease.ack(lease.messages[1:])
    seal(db)
    assert drop(db) == [(False, 0, f"group {GROUP}, partition 0, offset 1")]
    lease.ack()
    assert [row[0] for row in drop(db)] == [True, True]


@pytest.mark.req("V7", "V13")
def test_dead_letters_outlive_their_segment(c: Custody, db: psycopg.Connection) -> None:
    start(c, policy=Policy(max_attempts=1, backoff=Constant("1s")), keys="abc")
    c.create_group(TOPIC, "other", Policy(max_attempts=1))
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.nack(lease.messages[1], error="bad")
    lease.ack()
    c.claim(TOPIC, "other", max_messages=3).nack(error="all bad")
    seal(db)
    assert drop(db) == [(True, 3, None)]
    (letter,) = c.dead(TOPIC, GROUP)
    assert (letter.offset, letter.key, letter.payload, letter.last_error) == (1, "b", "b", "bad")
    assert len(c.dead(TOPIC, "other")) == 3
    events = db.execute('SELECT "offset" FROM custody.events ORDER BY 1').fetchall()
    assert events == [(0,), (1,), (2,)]
    with pytest.raises(OffsetOutOfRange):
        c.read(TOPIC, offset=1)


@pytest.mark.req("V7", "V8")
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_kept_dead_letter_is_redriven_and_delivered(
    c: Custody, db: psycopg.Connection, clock: Clock, ordering: str
) -> None:
    policy = Policy.from_mapping({"ordering": ordering, "max_attempts": 2, "backoff": {"initial": "1s"}})
    start(c, policy=policy, keys="aab")
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.nack(lease.messages[0], requeue=False)
    drain(c)
    if lease.messages[1:]:
        lease.ack() if ordering == "none" else None
    clock.move(30)
    drain(c)
    seal(db)
    assert drop(db) == [(True, 1, None)]
    keyed(c, "ab")
    assert c.redrive(TOPIC, GROUP) == [(0, 0)]
    again = c.claim(TOPIC, GROUP, max_messages=9)
    assert [(m.offset, m.payload, m.attempt) for m in again][:1] == [(0, "a", 1)]
    again.nack(again.messages[0], error="once more")
    assert c.trace(TOPIC, 0, 0)[-1].error == "once more"
    again.ack() if len(again) > 2 or ordering == "none" else None
    clock.move(30)
    assert 0 in offsets(drain(c))
    assert c.stats(TOPIC, GROUP).depth == 0


@pytest.mark.req("V7")
def test_discarding_the_last_dead_letter_removes_what_was_kept(c: Custody, db: psycopg.Connection) -> None:
    start(c, 2, Policy(max_attempts=1))
    c.create_group(TOPIC, "other", Policy(max_attempts=1))
    for group in (GROUP, "other"):
        c.claim(TOPIC, group, max_messages=2).nack()
    seal(db)
    drop(db)
    kept = 'SELECT "offset" FROM custody.kept_events ORDER BY 1'
    c.discard(TOPIC, GROUP)
    assert db.execute(kept).fetchall() == [(0,), (1,)], "the other group still has them"
    c.discard(TOPIC, "other", partition=0, offsets=[0])
    assert db.execute(kept).fetchall() == [(1,)]
    c.skip(TOPIC, "other", 0, 1)
    seal(db)
    drop(db)
    assert db.execute(kept).fetchall() == [], "what nobody has a case for goes with the next segment"


@pytest.mark.req("V7")
def test_a_kept_event_goes_once_its_redriven_message_is_done(c: Custody, db: psycopg.Connection) -> None:
    start(c, 1, Policy(max_attempts=1))
    c.claim(TOPIC, GROUP).nack()
    seal(db)
    drop(db)
    c.redrive(TOPIC, GROUP)
    drain(c)
    seal(db)
    drop(db)
    assert db.execute("SELECT count(*) FROM custody.kept_events").fetchone() == (0,)


@pytest.mark.req("V9", "V13")
def test_a_new_group_starts_where_the_log_starts(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic(TOPIC)
    fill(c, 5)
    seal(db)
    fill(c, 2)
    drop(db)
    c.create_group(TOPIC, GROUP)
    assert offsets(drain(c)) == [5, 6]
    with pytest.raises(OffsetOutOfRange, match="it goes from 5 to 7"):
        c.create_group(TOPIC, "early", start=4)
    c.create_group(TOPIC, "at", start=5)


@pytest.mark.req("V13")
def test_an_empty_log_goes_on_at_its_offset(c: Custody, db: psycopg.Connection) -> None:
    start(c, 5)
    drain(c)
    seal(db)
    drop(db)
    assert (c.topic(TOPIC).first_offsets, c.topic(TOPIC).tails) == ((5,), (5,))
    assert c.publish(TOPIC, 1).offset == 5
    assert c.publish_many(TOPIC, [Outgoing(n) for n in range(100)])[-1].offset == 105
    assert len(drain(c)) == 101


@pytest.mark.req("V13")
def test_partitions_of_a_segment_go_together(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic(TOPIC, partitions=3)
    c.create_group(TOPIC, GROUP)
    c.publish_many(TOPIC, [Outgoing(n, partition=n % 2) for n in range(10)])
    drain(c)
    seal(db)
    c.publish(TOPIC, "later", partition=2)
    assert drop(db) == [(True, 0, None)]
    assert c.topic(TOPIC).first_offsets == (5, 5, 0)
    assert [m.payload for m in drain(c)] == ["later"]


@pytest.mark.req("C6", "V13")
def test_what_was_dropped_no_longer_counts_for_the_depth(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic(TOPIC, max_depth=5)
    fill(c, 5)
    seal(db)
    drop(db)
    fill(c, 5)
    assert c.topic(TOPIC).message_count == 5


@pytest.mark.req("V13")
def test_leases_and_retries_across_many_segments_stay_right(c: Custody, db: psycopg.Connection, clock: Clock) -> None:
    start(c, policy=Policy(ordering="key", max_attempts=9, backoff=Constant("1s")))
    done: list[int] = []
    for n in range(6):
        keyed(c, "abcab")
        lease = c.claim(TOPIC, GROUP, max_messages=4)
        if n % 2 and lease:
            lease.nack(lease.messages[0])
        elif lease:
            done += offsets(lease)
            lease.ack()
        seal(db)
        drop(db)
        clock.move(30)
    done += offsets(drain(c, max_messages=3))
    assert sorted(done) == list(range(30))
    drop(db)
    assert c.topic(TOPIC).first_offsets == (30,)
