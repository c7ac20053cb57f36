"""Retention by itself: segments end and go by time and size, and nothing goes that somebody still needs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, fill, keyed, offsets, start

from custody import Constant, Custody, CustodyError, LeaseLost, Outgoing, Policy, Retention
from custody.errors import InvalidArgument, TopicNotFound
from custody.model.entities import Upkeep

pytestmark = pytest.mark.core

HOUR = 3600


def brief(done: list[Upkeep]) -> list[tuple[Any, ...]]:
    """(did, messages) of each step, and by whom a segment is held."""
    return [
        (one.did, one.messages, *(() if one.held_group is None else (one.held_group, one.held_offset))) for one in done
    ]


def keep(c: Custody, **retention: Any) -> None:
    c.set_retention(TOPIC, Retention(**retention))


@pytest.mark.req("V13")
def test_without_a_retention_nothing_is_sealed_and_nothing_goes(c: Custody, db: Any, clock: Clock) -> None:
    start(c, 5)
    drain(c)
    clock.move(365 * 86400)
    before = everything(db)
    assert c.maintain() == []
    assert c.maintain(TOPIC) == []
    assert everything(db) == before
    assert c.topic(TOPIC).retention is None


@pytest.mark.req("V13")
def test_segments_end_and_go_by_time(c: Custody, clock: Clock) -> None:
    start(c)
    keep(c, time="10h")
    assert c.maintain() == [], "an empty segment is not sealed"
    for _ in range(20):
        fill(c, 2)
        drain(c)
        clock.move(HOUR)
        c.maintain()
    kept = c.segments(TOPIC)
    assert 10 <= len(kept) <= 12
    # what is there is younger than ten hours and a segment's hour; what is gone is older than ten
    assert c.topic(TOPIC).first_offsets == (40 - c.topic(TOPIC).message_count,)
    assert 20 <= c.topic(TOPIC).message_count <= 24
    assert [segment.messages for segment in kept if segment.sealed_at] == [2] * (len(kept) - 1)
    clock.move(100 * HOUR)
    c.maintain()
    assert c.topic(TOPIC).message_count == 0
    assert c.publish(TOPIC, 1).offset == 40


@pytest.mark.req("V13")
def test_a_message_younger_than_the_time_is_never_dropped(c: Custody, clock: Clock) -> None:
    start(c)
    keep(c, time="1h", segment_time="10m")
    for minute in range(110):
        c.publish(TOPIC, minute)
        drain(c)
        c.maintain()
        clock.move(60)
        oldest = c.read(TOPIC, max_messages=1)[0].payload
        assert oldest <= max(0, minute - 59), "something younger than an hour is gone"
        assert oldest >= minute - 60 - 11, "something older than an hour and a segment is still there"


@pytest.mark.req("V13")
def test_segments_end_and_go_by_size(c: Custody) -> None:
    start(c)
    keep(c, size="1MB", segment_size="128KB")
    for _ in range(60):
        c.publish_many(TOPIC, [Outgoing("x" * 1000) for _ in range(50)])
        drain(c)
        c.maintain()
        total = sum(segment.bytes for segment in c.segments(TOPIC))
        assert total <= 2**20 + 2 * 2**17
    assert c.topic(TOPIC).first_offsets[0] > 1500
    assert len(c.segments(TOPIC)) >= 4
    assert sum(segment.messages for segment in c.segments(TOPIC)) == c.topic(TOPIC).message_count


@pytest.mark.req("V13")
@pytest.mark.parametrize("how", ["lag", "leased", "waiting", "parked", "returned", "held", "bare"])
def test_a_stuck_group_is_named_and_holds_its_segment(c: Custody, db: Any, clock: Clock, how: str) -> None:
    start(c, policy=Policy(ordering="key", on_dead="hold"), keys="aabcd")
    c.create_group(TOPIC, "other")
    if how == "bare":
        c.create_group(TOPIC, "tail", bare=True)
        c.commit(TOPIC, "tail", 0, 4)
    lease = c.claim(TOPIC, GROUP, max_messages=4 if how == "lag" else 5, visibility_timeout="30d")
    if how == "waiting":
        lease.nack(lease.messages[4])
    elif how == "parked":
        lease.nack(lease.messages[0])
    elif how == "returned":
        lease.release(lease.messages[3])
    elif how == "held":
        lease.nack(lease.messages[0], requeue=False)
    lease.ack(lease.messages[:4]) if how == "leased" else lease.ack()
    drain(c, group="other")
    keep(c, time="1h")
    clock.move(HOUR)
    c.maintain()
    clock.move(2 * HOUR)
    held = {"lag": 4, "leased": 4, "waiting": 4, "parked": 0, "returned": 3, "held": 0, "bare": 4}[how]
    group = "tail" if how == "bare" else GROUP
    before = everything(db)
    (step,) = c.maintain()
    assert (step.did, step.held_group, step.held_partition, step.held_offset) == ("held", group, 0, held)
    assert everything(db) == before
    (oldest, _) = c.segments(TOPIC)
    assert (oldest.held_group, oldest.held_partition, oldest.held_offset) == (group, 0, held)


@pytest.mark.req("V7", "V13")
def test_dead_letters_are_kept_aside(c: Custody, clock: Clock) -> None:
    start(c, 3, Policy(max_attempts=1))
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.nack(lease.messages[1], error="bad")
    lease.ack()
    keep(c, time="1h")
    clock.move(HOUR)
    assert brief(c.maintain()) == [("sealed", 3)]
    clock.move(HOUR)
    (step,) = c.maintain()
    assert (step.did, step.kept, step.lost) == ("dropped", 1, 0)
    assert [letter.payload for letter in c.dead(TOPIC, GROUP)] == [1]
    assert c.kept_aside(TOPIC).events == 1
    c.redrive(TOPIC, GROUP)
    fill(c, 1)
    clock.move(HOUR)
    assert brief(c.maintain()) == [("sealed", 1)]
    assert offsets(drain(c)) == [1, 3]
    clock.move(HOUR)
    assert brief(c.maintain()) == [("dropped", 1)]
    assert c.kept_aside(TOPIC).events == 0


@pytest.mark.req("V13")
def test_a_redriven_letter_that_was_kept_aside_holds_nothing(c: Custody, clock: Clock) -> None:
    """It is not in the segment: that can go, and the message is still delivered."""
    start(c, 1, Policy(max_attempts=1))
    c.claim(TOPIC, GROUP).nack()
    keep(c, time="1h")
    for _ in range(2):
        clock.move(HOUR)
        c.maintain()
    c.redrive(TOPIC, GROUP)
    kept = c.claim(TOPIC, GROUP, visibility_timeout="30d")
    assert offsets(kept) == [0]
    fill(c, 2)
    assert offsets(drain(c)) == [1, 2]
    for _ in range(2):
        clock.move(HOUR)
        c.maintain()
    assert c.topic(TOPIC).message_count == 0
    kept.nack(error="again")
    assert [letter.payload for letter in c.dead(TOPIC, GROUP)] == [0]


@pytest.mark.req("V13")
def test_what_is_unresolved_goes_where_the_topic_allows_it(c: Custody, db: Any, clock: Clock) -> None:
    """Fresh, waiting, parked and returned messages are done by it, and the journal says so; dead ones are kept."""
    policy = Policy(ordering="key", max_attempts=2, backoff=Constant("10d"), on_dead="hold")
    start(c, policy=policy, keys="aabbccdd")
    c.create_group(TOPIC, "tail", bare=True)
    lease = c.claim(TOPIC, GROUP, max_messages=6)
    lease.nack(lease.messages[0])  # 0 waits, 1 is released behind it
    lease.nack(lease.messages[2], error="bad", requeue=False)  # 2 is dead and held, 3 waits behind it
    lease.ack(lease.messages[4])  # 4 is done
    lease.release(lease.messages[5])  # 5 came back
    keep(c, time="1h", drop_unresolved=True)
    clock.move(HOUR)
    c.maintain()
    keyed(c, "abcd")  # 8 to 11, in the next segment
    clock.move(HOUR)
    _, step = c.maintain()
    # 0, 1, 3, 5 and the fresh 6 and 7 of the group; all 8 of the bare one
    assert (step.did, step.kept, step.lost) == ("dropped", 1, 14)
    assert c.topic(TOPIC).first_offsets == (8,)
    assert [letter.offset for letter in c.dead(TOPIC, GROUP)] == [2]
    assert [entry.kind for entry in c.trace(TOPIC, 0, 7, group=GROUP)] == ["drop"]
    assert c.trace(TOPIC, 0, 0, group=GROUP)[-1].kind == "drop"
    assert c.trace(TOPIC, 0, 4, group=GROUP)[-1].kind == "ack"
    stats = c.stats(TOPIC, GROUP)
    assert (stats.depth, stats.waiting, stats.parked, stats.dead) == (5, 0, 0, 1)
    assert c.fetch(TOPIC, "tail")[0].offset == 8
    # the key of the dead message still waits for its operator; the others go on
    assert offsets(drain(c)) == [8, 10, 11]
    c.redrive(TOPIC, GROUP)
    assert offsets(drain(c)) == [2, 9]


@pytest.mark.req("V13")
def test_what_is_in_flight_is_never_taken_away(c: Custody, clock: Clock) -> None:
    start(c, 3)
    lease = c.claim(TOPIC, GROUP, max_messages=2, visibility_timeout="3h")
    keep(c, time="1h", drop_unresolved=True)
    clock.move(HOUR)
    c.maintain()
    clock.move(HOUR)
    assert brief(c.maintain()) == [("held", 3, GROUP, 0)]
    assert c.segments(TOPIC)[0].held_group == GROUP
    lease.ack(lease.messages[0])
    clock.move(2 * HOUR)
    (step,) = c.maintain()
    assert (step.did, step.lost) == ("dropped", 2), "an expired lease holds nothing"
    with pytest.raises(LeaseLost):
        lease.ack()
    assert c.stats(TOPIC, GROUP).depth == 0
    assert not c.claim(TOPIC, GROUP)


@pytest.mark.req("V7", "V13")
def test_what_dies_of_its_expired_lease_meanwhile_is_kept_and_copied(c: Custody, clock: Clock) -> None:
    start(c, 2, Policy(max_attempts=1, dead_letter="topic"))
    c.claim(TOPIC, GROUP, visibility_timeout="1h")
    keep(c, time="1h", drop_unresolved=True)
    clock.move(HOUR)
    c.maintain(TOPIC)
    clock.move(HOUR)
    (step,) = c.maintain(TOPIC)
    assert (step.did, step.kept, step.lost) == ("dropped", 1, 1)
    assert [letter.payload for letter in c.dead(TOPIC, GROUP)] == [0]
    assert [message.payload for message in c.read(f"{TOPIC}-dlq")] == [0]


def test_settings_are_kept_and_shown(c: Custody) -> None:
    made = c.create_topic(TOPIC, retention=Retention(time="7d", size="10GB", drop_unresolved=True))
    assert made.retention is not None
    assert made.retention.columns() == {
        "time": f"{7.0 * 86400} s",
        "segment_time": "60480.0 s",
        "bytes": 10 * 2**30,
        "segment_bytes": 2**30,
        "drop_unresolved": True,
    }
    assert c.set_retention(TOPIC, None).retention is None
    small = c.set_retention(TOPIC, Retention(size="2MB")).retention
    assert small is not None
    assert (small.segment_size, small.segment_time) == (2**20, None)
    plain = c.set_retention(TOPIC, Retention(time="2h")).retention
    assert plain is not None
    assert (plain.size, plain.segment_size, plain.segment_time) == (None, None, timedelta(minutes=12))


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"segment_time": "1h"},
        {"time": 0},
        {"size": 0},
        {"size": "12 apples"},
        {"size": True},
        {"size": "-1MB"},
        {"time": "1h", "segment_size": 0},
    ],
)
def test_a_retention_that_says_nothing_or_nonsense_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Retention(**bad)


def test_bad_arguments_from_sql_change_nothing(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic(TOPIC, retention=Retention(time="1h"))
    before = everything(db)
    for call in ("'-1 s'", "NULL, 0", "NULL, NULL, '1 h'", "NULL, NULL, NULL, NULL, true"):
        with pytest.raises(psycopg.Error) as refused:
            db.execute(f"SELECT custody.set_retention('{TOPIC}', {call})")
        assert refused.value.diag.message_detail == "invalid_argument"
    assert everything(db) == before
    with pytest.raises(TopicNotFound):
        c.maintain("nowhere")
    with pytest.raises(TopicNotFound):
        c.set_retention("nowhere", None)
    with pytest.raises(CustodyError):
        c.segments("nowhere")


@pytest.mark.req("V13")
def test_every_topic_is_maintained_by_its_own_rules(c: Custody, clock: Clock) -> None:
    for name, retention in (("a", Retention(time="1h")), ("b", None), ("c", Retention(time="100h"))):
        c.create_topic(name, retention=retention)
        c.publish(name, 1)
    clock.move(HOUR)
    assert [(one.topic, one.did) for one in c.maintain()] == [("a", "sealed")]
    clock.move(10 * HOUR)
    assert [(one.topic, one.did) for one in c.maintain()] == [("a", "dropped"), ("c", "sealed")]
    assert [c.topic(name).message_count for name in "abc"] == [0, 1, 1]


@pytest.mark.req("V13")
def test_segments_that_are_gone_leave_nothing_behind(c: Custody, db: psycopg.Connection, clock: Clock) -> None:
    start(c)
    keep(c, time="1h")
    for _ in range(30):
        fill(c, 1)
        drain(c)
        clock.move(HOUR)
        c.maintain()
    counts = db.execute("SELECT (SELECT count(*) FROM custody.segments), (SELECT count(*) FROM custody.segment_bounds)")
    assert max(counts.fetchone() or ()) <= 4
