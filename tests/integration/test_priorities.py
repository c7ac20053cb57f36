"""Priorities: lanes of a partition, served by weight, and none waits past the limit."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import everything

import custody
from custody import Constant, Custody, Outgoing, Policy
from custody.errors import InvalidArgument, NoPriorities, PartitionNotFound
from custody.model.lanes import PRIORITIES, WEIGHTS, Priority, priority_of
from custody.model.placement import partition_for
from custody.verbs import log

pytestmark = [pytest.mark.core, pytest.mark.req("G16")]

JOBS, GROUP = "jobs", "workers"


def start(c: Custody, *, partitions: int = 1, backlog: int = 0, policy: Policy | None = None) -> None:
    c.create_topic(JOBS, partitions=partitions, priorities=True, starvation_limit="60s")
    c.create_group(JOBS, GROUP, policy)
    for priority in PRIORITIES if backlog else ():
        c.publish_many(JOBS, [Outgoing(n, priority=priority) for n in range(backlog)])


def test_each_partition_is_five_in_the_log(c: Custody) -> None:
    made = c.create_topic(JOBS, partitions=4, priorities=True)
    assert (made.partitions, made.priorities, made.starvation_limit) == (20, True, timedelta(minutes=1))
    plain = c.create_topic("plain", partitions=4)
    assert (plain.partitions, plain.priorities, plain.starvation_limit) == (4, False, None)


@pytest.mark.parametrize("many", [1, 2, 20])
def test_a_key_and_a_priority_give_one_partition(c: Custody, monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    monkeypatch.setattr(log, "COPY_FROM", 20)
    start(c, partitions=4)
    for lane, priority in enumerate(PRIORITIES):
        receipts = c.publish_many(JOBS, [Outgoing(n, key="k", priority=priority) for n in range(many)])
        assert {receipt.partition for receipt in receipts} == {5 * partition_for("k", 4) + lane}
        anywhere = c.publish_many(JOBS, [Outgoing(n, priority=priority) for n in range(many)])
        assert {receipt.partition % 5 for receipt in anywhere} == {lane}
    assert priority_of(c.publish(JOBS, 0, key="k").partition) == "normal"


def test_a_message_knows_its_priority(c: Custody) -> None:
    start(c, policy=Policy(max_attempts=1))
    where = c.publish(JOBS, 1, key="k", priority="low")
    assert [message.priority for message in c.read(JOBS, where.partition)] == ["low"]
    lease = c.claim(JOBS, GROUP)
    assert [message.priority for message in lease] == ["low"]
    lease.nack()
    assert [dead.priority for dead in c.dead(JOBS, GROUP)] == ["low"]
    lanes = [one.priority for one in c.stats(JOBS, GROUP).partitions]
    assert lanes == list(PRIORITIES)


def test_a_topic_without_priorities_has_none(c: Custody, db: psycopg.Connection[Any]) -> None:
    c.create_topic("plain", partitions=5)
    c.create_group("plain", GROUP)
    c.publish("plain", 1, key="k", priority="normal")  # what all of its messages are
    before = everything(db)
    with pytest.raises(NoPriorities, match="priorities=True"):
        c.publish("plain", 1, priority="high")
    with pytest.raises(NoPriorities):
        c.publish_many("plain", [Outgoing(n, key="k", priority="low") for n in range(100)])
    with pytest.raises(psycopg.DatabaseError, match="has no priorities"):
        db.execute("SELECT custody.send('plain', '1', p_priority => 'high')")
    assert everything(db) == before
    assert [message.priority for message in c.claim("plain", GROUP)] == [None]
    assert {one.priority for one in c.stats("plain", GROUP).partitions} == {None}


def test_bad_input_is_refused(c: Custody, db: psycopg.Connection[Any]) -> None:
    start(c, partitions=2)
    before = everything(db)
    urgent: Any = "urgent"
    with pytest.raises(InvalidArgument, match="critical, high, normal, low, background"):
        c.publish(JOBS, 1, key="k", priority=urgent)
    with pytest.raises(InvalidArgument, match="partition 6 is for high messages"):
        c.publish(JOBS, 1, partition=6, priority="low")
    with pytest.raises(PartitionNotFound):
        c.publish(JOBS, 1, partition=10)
    with pytest.raises(InvalidArgument, match="needs priorities"):
        c.create_topic("other", starvation_limit="1s")
    with pytest.raises(InvalidArgument, match="must be positive"):
        c.create_topic("other", priorities=True, starvation_limit=0)
    with pytest.raises(InvalidArgument, match="1 to 819"):
        c.create_topic("other", priorities=True, partitions=820)
    assert everything(db) == before
    assert c.publish(JOBS, 1, partition=6, priority="high").partition == 6
    assert c.publish(JOBS, 1, partition=6).partition == 6


def test_who_knew_the_topic_from_before_places_anew(c: Custody, database_url: str) -> None:
    c.create_topic(JOBS, partitions=5)
    c.publish(JOBS, 1, key="k")
    with custody.connect(database_url) as other:
        other.delete_topic(JOBS)
        other.create_topic(JOBS, priorities=True)
    assert c.publish(JOBS, 1, key="k").partition == 2
    assert c.publish(JOBS, 1, key="k", priority="high").partition == 1


def test_sql_places_as_python_does(c: Custody, db: psycopg.Connection[Any]) -> None:
    start(c, partitions=4)
    for priority in PRIORITIES:
        (sent,) = db.execute("SELECT partition FROM custody.send(%s, '1', 'k', NULL, %s)", [JOBS, priority]).fetchall()
        assert sent[0] == c.publish(JOBS, 1, key="k", priority=priority).partition
    (sent,) = db.execute("SELECT partition FROM custody.send(%s, '1')", [JOBS]).fetchall()
    assert priority_of(sent[0]) == "normal"


def test_claims_follow_the_weights(c: Custody, db: psycopg.Connection[Any], clock: Clock) -> None:
    start(c, partitions=2, backlog=4)
    draws = 1000
    db.execute("SELECT setseed(0.25)")
    rows = db.execute(
        "SELECT custody.lane((custody.candidates_by_priority(g, '1 min', %s))[1]) "
        "FROM generate_series(1, %s), custody.group_named(%s, %s) g",
        [clock(), draws, JOBS, GROUP],
    ).fetchall()
    drawn = Counter(name for (name,) in rows)
    for name, weight in WEIGHTS.items():
        assert abs(drawn[name] / draws * 100 - weight) < 4, drawn


@pytest.mark.parametrize("size", [1, 4])
def test_a_lease_has_one_priority_and_all_are_served(c: Custody, size: int) -> None:
    start(c, backlog=8)
    seen: Counter[Priority | None] = Counter()
    while lease := c.claim(JOBS, GROUP, max_messages=size):
        assert len({message.priority for message in lease}) == 1
        assert len({message.partition for message in lease}) == 1
        seen.update(message.priority for message in lease)
        lease.ack()
    assert seen == dict.fromkeys(PRIORITIES, 8)


def test_the_order_of_a_key_holds_within_a_priority(c: Custody, clock: Clock) -> None:
    start(c, partitions=2, policy=Policy(ordering="key", backoff=Constant("1s"), max_attempts=9))
    c.publish_many(JOBS, [Outgoing(n, key=f"k{n % 3}", priority=PRIORITIES[n % 5]) for n in range(150)])
    done: dict[tuple[str | None, Priority | None], list[int]] = {}
    turn = 0
    while lease := c.claim(JOBS, GROUP, max_messages=4):
        turn += 1
        if turn % 3 == 0:
            lease.nack()
            clock.move(1)
            continue
        for message in lease:
            done.setdefault((message.key, message.priority), []).append(message.payload)
        lease.ack()
    assert sum(map(len, done.values())) == 150
    assert all(payloads == sorted(payloads) for payloads in done.values())


def test_nothing_waits_past_the_limit(c: Custody, clock: Clock) -> None:
    """Critical messages fill all there is to do; one of each other priority is handed out within the limit."""
    start(c)
    for priority in PRIORITIES[1:]:
        c.publish(JOBS, priority, priority=priority)
    waited: dict[Priority, float] = {}
    for second in range(64):
        c.publish_many(JOBS, [Outgoing(second, priority="critical")] * 2)
        for message in (lease := c.claim(JOBS, GROUP)):
            if message.priority not in (None, "critical"):
                waited[message.priority] = second
            lease.ack()
        clock.move(1)
    assert set(waited) == set(PRIORITIES[1:])
    # each second has one claim: of the four that come to their limit together one goes at once, one a second later, …
    assert sorted(waited.values())[0] <= 60
    assert max(waited.values()) <= 63


def test_what_starves_goes_first(c: Custody, clock: Clock) -> None:
    start(c)
    c.publish(JOBS, 0, priority="background")
    c.publish(JOBS, 1, priority="background")
    clock.move(60)
    c.publish_many(JOBS, [Outgoing(n, priority="critical") for n in range(50)])
    for n in range(2):
        assert [(m.priority, m.payload) for m in c.claim(JOBS, GROUP)] == [("background", n)]
    assert c.claim(JOBS, GROUP).messages[0].priority == "critical"


def test_a_retry_waits_since_it_was_due(c: Custody, clock: Clock) -> None:
    start(c, policy=Policy(backoff=Constant("100s", cap="1h")))
    c.publish(JOBS, 0, priority="background")
    c.claim(JOBS, GROUP).nack()
    clock.move(159)
    c.publish_many(JOBS, [Outgoing(n, priority="critical") for n in range(50)])
    (since,) = {one for one in _since(c, clock) if one is not None and one < clock()}
    assert since == clock() - timedelta(seconds=59)
    clock.move(1)
    assert c.claim(JOBS, GROUP).messages[0].priority == "background"


def test_what_is_behind_a_key_in_flight_does_not_starve(c: Custody, clock: Clock) -> None:
    start(c, policy=Policy(ordering="key", visibility_timeout="1h"))
    c.publish_many(JOBS, [Outgoing(n, key="k", priority="low") for n in range(3)])
    held = c.claim(JOBS, GROUP)
    assert not c.claim(JOBS, GROUP)  # parks the other two
    clock.move(100)
    assert _since(c, clock)[3] is None
    c.publish(JOBS, 0, priority="critical")
    assert c.claim(JOBS, GROUP).messages[0].priority == "critical"
    held.ack()
    assert _since(c, clock)[3] == clock() - timedelta(seconds=100)
    c.publish(JOBS, 0, priority="critical")
    assert c.claim(JOBS, GROUP).messages[0].priority == "low"


def test_what_is_behind_a_key_whose_lease_has_expired_waits_since_it_was_published(c: Custody, clock: Clock) -> None:
    start(c, policy=Policy(ordering="key"))
    published = clock()
    c.publish_many(JOBS, [Outgoing(n, key="k", priority="low") for n in range(3)])
    assert c.claim(JOBS, GROUP)
    assert not c.claim(JOBS, GROUP)  # parks the other two
    clock.move(100)
    assert _since(c, clock)[3] == published


def _since(c: Custody, clock: Clock) -> list[Any]:
    """Since when each lane waits."""
    with psycopg.connect(c.database_url) as db:
        rows = db.execute(
            "SELECT custody.waiting_since(g, h, %s) FROM custody.group_named(%s, %s) g "
            "JOIN custody.heads h USING (topic_id) ORDER BY h.partition",
            [clock(), JOBS, GROUP],
        ).fetchall()
    return [since for (since,) in rows]


def _taken(c: Custody, size: int) -> dict[Priority, int]:
    drive, _ = c.drive(JOBS, GROUP)
    claimed = drive.claim(size)
    assert claimed.number is not None
    parts = drive.claimed(claimed.number)
    taken = {priority_of(part.partition): part.messages for part in parts}
    drive.release()
    return taken


@pytest.mark.req("S4")
def test_a_pipelines_claim_is_shared_by_weight(c: Custody, clock: Clock) -> None:
    start(c, backlog=200)
    assert _taken(c, 100) == WEIGHTS
    clock.move(10)
    c.claim(JOBS, GROUP, partition=0, max_messages=195).ack()
    # what the critical ones leave goes to the others, by their weights
    left = _taken(c, 100)
    assert left["critical"] == 5
    assert sum(left.values()) == 100
    assert [round(left[name] / WEIGHTS[name], 1) for name in PRIORITIES[1:]] == pytest.approx([1.9] * 4, abs=0.3)


@pytest.mark.req("S4")
def test_a_pipelines_claim_takes_what_starves_first(c: Custody, clock: Clock) -> None:
    start(c)
    c.publish_many(JOBS, [Outgoing(n, priority="background") for n in range(30)])
    clock.move(60)
    for priority in PRIORITIES[:2]:
        c.publish_many(JOBS, [Outgoing(n, priority=priority) for n in range(200)])
    taken = _taken(c, 100)
    assert taken["background"] == 30
    assert sum(taken.values()) == 100
    assert taken["critical"] == pytest.approx(2 * taken["high"], abs=2)


def test_other_topics_pay_nothing(c: Custody, db: psycopg.Connection[Any]) -> None:
    """A claim of a plain topic and of a plain group calls none of the functions of priorities and fairness."""
    c.create_topic("plain", partitions=3)
    c.create_group("plain", GROUP, Policy(ordering="key"))
    c.publish_many("plain", [Outgoing(n, key=f"k{n % 2}") for n in range(20)])
    start(c, backlog=1)

    def called(topic: str) -> set[str]:
        with db.transaction():
            db.execute("SET LOCAL track_functions = 'all'")
            db.execute("SELECT * FROM custody.claim(%s, %s, 2)", [topic, GROUP])
            rows = db.execute("SELECT funcname FROM pg_stat_xact_user_functions").fetchall()
        return {name for (name,) in rows}

    ours = {"waiting_since", "take_fairly", "take_fresh_fairly", "take_parked_fairly", "await_turn", "next_in_turn"}
    for _ in range(3):
        assert not called("plain") & ours
    assert "waiting_since" in called(JOBS)


@pytest.mark.parametrize("kind", ["delayed", "outbox"])
def test_what_is_due_and_not_in_the_log_does_not_starve(
    c: Custody, clock: Clock, db: psycopg.Connection, kind: str
) -> None:
    c.create_topic("jobs", partitions=1, priorities=True, starvation_limit="60s")
    c.create_group("jobs", "g")
    c.publish_many("jobs", [Outgoing("backlog", priority="background") for _ in range(300)])
    if kind == "delayed":
        c.publish("jobs", "urgent", priority="critical", delay="1s")
    else:
        db.execute("SELECT custody.outbox_write('t', '\"urgent\"', 'jobs', p_available_at => '2000-01-01')")
    clock.move(30)
    seen = []
    while "urgent" not in seen:
        lease = c.claim("jobs", "g")
        assert len(seen) < 100, "it waits behind all the others"
        seen += [message.payload for message in lease]
        lease.ack()
