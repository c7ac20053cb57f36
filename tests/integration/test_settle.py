"""Settle: every outcome, for one message and for all; fenced by the lease, its deadline and its membership."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, offsets, start

from custody import Breaker, Constant, Custody, Exponential, Lease, LeaseLost, Linear, Outcome, Outgoing, Policy
from custody.errors import InvalidArgument, OrderConflict
from custody.model.entities import Settled
from custody.verbs.settle import LONGEST_ERROR

pytestmark = pytest.mark.core

# every verb, as it is called on a lease
VERBS: dict[str, Callable[[Lease], Any]] = {
    "ack": lambda lease: lease.ack(),
    "ack one": lambda lease: lease.ack(lease.messages[0]),
    "nack": lambda lease: lease.nack(),
    "nack one": lambda lease: lease.nack(lease.messages[0]),
    "dead": lambda lease: lease.nack(requeue=False),
    "release": lambda lease: lease.release(),
    "release one": lambda lease: lease.release(lease.messages[0]),
    "later": lambda lease: lease.later(after="1s"),
    "skip": lambda lease: lease.skip(reason="cancelled"),
    "extend": lambda lease: lease.extend(),
    "extend one": lambda lease: lease.extend(message=lease.messages[0]),
}


@pytest.mark.req("C1")
def test_ack_without_a_name_is_about_all_that_is_left(c: Custody, db: psycopg.Connection) -> None:
    start(c, 10)
    lease = c.claim(TOPIC, GROUP, max_messages=10)
    assert lease.ack(lease.messages[3]).settled == 1
    assert lease.ack(lease.messages[5], lease.messages[6]).settled == 2
    assert lease.ack(lease.messages[8:]).settled == 2
    assert c.stats(TOPIC, GROUP).in_flight == 5
    assert lease.ack().settled == 5
    assert c.stats(TOPIC, GROUP).depth == 0
    assert db.execute("SELECT count(*) FROM custody.deliveries").fetchone() == (0,)


@pytest.mark.req("C1")
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("messages", [4, 600])  # a large lease is split when it is settled piecemeal
def test_a_verb_touches_no_lease_but_its_own(c: Custody, db: psycopg.Connection, verb: str, messages: int) -> None:
    """Leases of other groups, partitions and topics hold the same offsets."""
    for topic in (TOPIC, "elsewhere"):
        c.create_topic(topic, partitions=2)
        for partition in (0, 1):
            c.publish_many(topic, [Outgoing(n, partition=partition) for n in range(messages)])
        for group in (GROUP, "other"):
            c.create_group(topic, group, Policy(backoff=Constant("10s")))

    def leases_of(lease: Lease) -> list[Any]:
        rows = db.execute("SELECT l::text FROM custody.leases l WHERE lease_id = %s ORDER BY part", [lease.lease_id])
        return rows.fetchall()

    everywhere = [
        c.claim(topic, group, partition=partition, max_messages=messages, visibility_timeout="50s")
        for topic in (TOPIC, "elsewhere")
        for group in (GROUP, "other")
        for partition in (0, 1)
    ]
    for others in everywhere:
        others.extend(message=others.messages[1], timeout="40s")  # two rows each
    mine = everywhere.pop(2)
    before = [leases_of(lease) for lease in everywhere]
    assert {len(rows) for rows in before} == {2}
    VERBS[verb](mine)
    assert [leases_of(lease) for lease in everywhere] == before
    counted = "SELECT sum(remaining + settled), min(size) FROM custody.leases WHERE lease_id = %s"
    # with another sum a verb for the whole lease has to find in the journal what it means
    assert db.execute(counted, [mine.lease_id]).fetchone() in ((None, None), (messages, messages))
    for lease in everywhere:
        assert lease.ack().settled == messages


@pytest.mark.req("C1")
def test_an_empty_list_settles_nothing(c: Custody, db: psycopg.Connection) -> None:
    start(c, 3)
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    before = everything(db)
    for settled in (
        lease.ack([]),
        lease.nack([]),
        lease.release([]),
        lease.later([], after=1),
        c.ack(lease.lease_id, []),
    ):
        assert settled.settled == 0
    assert everything(db) == before


@pytest.mark.req("N1")
def test_success_leaves_no_row_for_a_message(c: Custody, db: psycopg.Connection) -> None:
    start(c, 1000)
    c.claim(TOPIC, GROUP, max_messages=1000).ack()
    tables = everything(db)
    assert all(tables[name] == [] for name in ("leases", "returned", "cases", "parked", "freed", "awaited"))
    assert len(tables["journal"]) == 3, "the start, the claim and the ack"


@pytest.mark.req("C1", "V12")
def test_each_verb_works_by_id_in_another_process(c: Custody, clock: Clock) -> None:
    start(c, 6, Policy(backoff=Constant("1s")))
    lease_id = c.claim(TOPIC, GROUP, max_messages=6).lease_id
    assert c.extend(lease_id, "90s") == clock.time + timedelta(seconds=90)
    assert c.extend(lease_id, "60s", offset=5) == clock.time + timedelta(seconds=60)
    assert c.ack(lease_id, [0]).settled == 1
    assert c.nack(lease_id, [1], error="x", requeue=False).dead == (1,)
    assert c.nack(lease_id, [2]).settled == 1
    assert c.release(lease_id, [3]).settled == 1
    assert c.later(lease_id, [4], after="2s").settled == 1
    assert c.ack(lease_id).settled == 1
    assert offsets(drain(c)) == [3]
    clock.move(1)
    assert offsets(drain(c)) == [2]
    clock.move(1)
    assert offsets(drain(c)) == [4]


@pytest.mark.req("V12", "C5")
def test_one_call_settles_many_outcomes_in_one_commit(c: Custody, clock: Clock, db: psycopg.Connection) -> None:
    start(c, 6, Policy(backoff=Constant("1s")))
    lease = c.claim(TOPIC, GROUP, max_messages=6)
    result = c.settle(
        lease.lease_id,
        {
            0: Outcome("ack"),
            1: Outcome("nack", error="one"),
            2: Outcome("nack", error="two", delay="10s"),
            3: Outcome("dead", error="three"),
            4: Outcome("later", delay="5s"),
            5: Outcome("release"),
        },
    )
    assert (result.settled, result.dead, result.released) == (6, (3,), ())
    entries = db.execute("SELECT count(DISTINCT xid) FROM custody.journal WHERE kind NOT IN ('start', 'claim')")
    assert entries.fetchone() == (1,)
    rows = db.execute(
        "SELECT event_offset, status, attempts, last_error, run_at FROM custody.deliveries ORDER BY event_offset"
    ).fetchall()
    assert rows == [
        (1, "ready", 1, "one", clock.time + timedelta(seconds=1)),
        (2, "ready", 1, "two", clock.time + timedelta(seconds=10)),
        (3, "dead", 1, "three", None),
        (4, "ready", 0, None, clock.time + timedelta(seconds=5)),
        (5, "ready", 0, None, clock.time),
    ]


def test_an_outcome_that_is_none_is_refused(c: Custody, db: psycopg.Connection) -> None:
    start(c, 2)
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    before = everything(db)
    with pytest.raises(InvalidArgument, match=r"is not an outcome.*one of ack, nack"):
        c.settle(lease.lease_id, {0: Outcome("ack"), 1: Outcome("done")})  # type: ignore[arg-type]
    assert everything(db) == before


@pytest.mark.req("V4", "G6")
def test_a_nack_waits_its_backoff_or_its_own_delay(c: Custody, clock: Clock) -> None:
    start(c, 2, Policy(backoff=Constant("10s")))
    c.claim(TOPIC, GROUP).nack()
    c.claim(TOPIC, GROUP).nack(delay="3s")
    clock.move(2.999)
    assert not c.claim(TOPIC, GROUP)
    clock.move(0.001)
    assert offsets(c.claim(TOPIC, GROUP, max_messages=5)) == [1]
    clock.move(6.999)
    assert not c.claim(TOPIC, GROUP)
    clock.move(0.001)
    assert offsets(c.claim(TOPIC, GROUP, max_messages=5)) == [0]


def waits(c: Custody, clock: Clock, failures: int) -> list[float]:
    """How long a message waits after each failure."""
    found = []
    for _ in range(failures):
        c.claim(TOPIC, GROUP).nack()
        due = c.next_due(TOPIC, GROUP)
        assert due is not None
        found.append(round(due, 6))
        clock.move(due)
    return found


@pytest.mark.req("V4")
def test_the_three_kinds_of_backoff_and_their_cap(c: Custody, clock: Clock) -> None:
    start(c, 1, Policy(max_attempts=100, backoff=Exponential("1s", multiplier=3, cap="1m")))
    assert waits(c, clock, 6) == [1, 3, 9, 27, 60, 60]
    c.update_group(TOPIC, GROUP, Policy(max_attempts=100, backoff=Linear("5s", cap="37s")))
    assert waits(c, clock, 3) == [35, 37, 37]
    c.update_group(TOPIC, GROUP, Policy(max_attempts=100, backoff=Constant("10s")))
    assert waits(c, clock, 2) == [10, 10]


@pytest.mark.req("V4", "G8")
def test_the_default_backoff_doubles_from_100_ms(c: Custody, clock: Clock) -> None:
    start(c, 1)
    c.update_group(TOPIC, GROUP, Policy(max_attempts=100))
    assert waits(c, clock, 10) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30]


@pytest.mark.req("V4")
def test_a_backoff_does_not_overflow_after_many_failures(c: Custody, clock: Clock, db: psycopg.Connection) -> None:
    start(c, 1, Policy(max_attempts=10**6, backoff=Exponential("1s", multiplier=1000, cap="1h")))
    c.claim(TOPIC, GROUP).nack(delay=0)
    db.execute("UPDATE custody.cases SET failures = 100000")
    assert waits(c, clock, 1) == [3600]


@pytest.mark.req("V4")
def test_jitter_takes_off_up_to_its_share(c: Custody, clock: Clock) -> None:
    start(c, 1, Policy(max_attempts=1000, backoff=Constant("100s", jitter=0.2)))
    seen = waits(c, clock, 30)
    assert all(80 <= wait <= 100 for wait in seen)
    assert len(set(seen)) > 20


@pytest.mark.req("V4", "G8")
def test_a_message_is_dead_after_its_last_attempt(c: Custody, clock: Clock) -> None:
    start(c, 1)
    for attempt in (1, 2):
        assert c.claim(TOPIC, GROUP).nack(error=f"e{attempt}").dead == ()
        clock.move(1)
    assert c.claim(TOPIC, GROUP).nack(error="e3").dead == (0,)
    clock.move(3600)
    assert not c.claim(TOPIC, GROUP)
    (letter,) = c.dead(TOPIC, GROUP)
    assert (letter.attempts, letter.reason, letter.last_error) == (3, "max_retries_exceeded", "e3")
    assert letter.errors == ("attempt 1: e1", "attempt 2: e2", "attempt 3: e3")


@pytest.mark.req("G6")
def test_a_nack_without_requeue_is_dead_at_once(c: Custody) -> None:
    start(c, 2)
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    assert lease.nack(lease.messages[1], error="bad", requeue=False).dead == (1,)
    (letter,) = c.dead(TOPIC, GROUP)
    assert (letter.offset, letter.attempts, letter.reason, letter.last_error) == (1, 1, "rejected", "bad")


@pytest.mark.req("C1", "C3")
def test_release_gives_back_at_once_and_costs_nothing(c: Custody) -> None:
    start(c, 3, Policy(max_attempts=1))
    for _ in range(5):
        lease = c.claim(TOPIC, GROUP, max_messages=3)
        assert [(m.offset, m.attempt) for m in lease] == [(0, 1), (1, 1), (2, 1)]
        lease.release(lease.messages[1])
        lease.release()
    assert c.dead(TOPIC, GROUP) == []


@pytest.mark.req("V12", "C3")
def test_later_comes_back_in_its_time_and_costs_nothing(c: Custody, clock: Clock) -> None:
    start(c, 1, Policy(max_attempts=1))
    for _ in range(3):
        lease = c.claim(TOPIC, GROUP)
        assert lease.messages[0].attempt == 1
        lease.later(after="5s")
        clock.move(4)
        assert not c.claim(TOPIC, GROUP)
        clock.move(1)
    assert c.claim(TOPIC, GROUP).nack().dead == (0,)


@pytest.mark.req("G7")
def test_extend_sets_the_deadline_to_now_plus_the_timeout(c: Custody, clock: Clock) -> None:
    start(c, 1, Policy(visibility_timeout="20s"))
    lease = c.claim(TOPIC, GROUP)
    clock.move(15)
    assert lease.extend("60s") == lease.deadline == clock.time + timedelta(seconds=60)
    assert lease.extend() == clock.time + timedelta(seconds=20)
    assert lease.extend("1s") == clock.time + timedelta(seconds=1), "it may be shortened, too"
    clock.move(1)
    with pytest.raises(LeaseLost):
        lease.extend()


@pytest.mark.req("G7", "C1")
def test_extending_one_message_keeps_it_when_the_others_expire(c: Custody, clock: Clock) -> None:
    start(c, 20)
    lease = c.claim(TOPIC, GROUP, max_messages=20)
    assert lease.extend("90s", message=lease.messages[7]) == clock.time + timedelta(seconds=90)
    clock.move(30)
    stats = c.stats(TOPIC, GROUP)
    assert (stats.in_flight, stats.waiting) == (1, 19)
    with pytest.raises(LeaseLost) as lost:
        lease.ack(lease.messages[6], lease.messages[8])
    assert lost.value.lost == (6, 8)
    assert lease.ack(lease.messages[7]).settled == 1
    again = drain(c)
    assert sorted(offsets(again)) == [n for n in range(20) if n != 7]
    assert {m.attempt for m in again} == {2}


def test_a_timeout_of_zero_is_refused(c: Custody) -> None:
    start(c, 1)
    with pytest.raises(InvalidArgument, match="Release the message to give it back at once"):
        c.claim(TOPIC, GROUP).extend(0)


@pytest.mark.req("G14")
def test_every_verb_at_the_deadline_is_lost_and_changes_nothing(
    c: Custody, clock: Clock, db: psycopg.Connection
) -> None:
    start(c, 2)
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    before = everything(db)
    clock.move(30)
    for name, verb in VERBS.items():
        with pytest.raises(LeaseLost):
            verb(lease)
        assert everything(db) == before, name


@pytest.mark.req("G14")
def test_just_before_the_deadline_is_in_time(c: Custody, clock: Clock) -> None:
    start(c, 1)
    lease = c.claim(TOPIC, GROUP)
    clock.move(29.999999)
    assert lease.ack().settled == 1


@pytest.mark.req("G14", "V5")
def test_a_late_worker_cannot_settle_what_another_has(c: Custody, clock: Clock, db: psycopg.Connection) -> None:
    start(c, 1)
    late = c.claim(TOPIC, GROUP)
    clock.move(30)
    now = c.claim(TOPIC, GROUP)
    assert offsets(now) == [0]
    before = everything(db)
    for verb in VERBS.values():
        with pytest.raises(LeaseLost, match="do not act on it"):
            verb(late)
    assert everything(db) == before
    assert now.ack().settled == 1


@pytest.mark.req("N2")
def test_what_the_lease_does_not_hold_is_lost_and_the_rest_is_settled(c: Custody) -> None:
    start(c, 6)
    mine = c.claim(TOPIC, GROUP, max_messages=3)
    other = c.claim(TOPIC, GROUP, max_messages=2)
    with pytest.raises(LeaseLost, match="does not hold offsets 3, 5, 99") as lost:
        c.ack(mine.lease_id, [1, 3, 5, 99])
    assert lost.value.lost == (3, 5, 99)
    assert (mine.ack().settled, other.ack().settled) == (2, 2)
    assert offsets(drain(c)) == [5]


@pytest.mark.req("N2", "G14")
def test_a_second_settle_is_lost_and_an_unknown_lease_too(c: Custody, db: psycopg.Connection) -> None:
    start(c, 2)
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    lease.ack(lease.messages[0])
    before = everything(db)
    with pytest.raises(LeaseLost):
        lease.nack(lease.messages[0])
    with pytest.raises(LeaseLost):
        c.ack(uuid4())
    with pytest.raises(LeaseLost):
        c.ack(uuid4(), [0])
    assert everything(db) == before
    lease.ack()
    before = everything(db)
    for name, verb in VERBS.items():
        if name.startswith("ack"):
            assert verb(lease).already
            continue
        with pytest.raises(LeaseLost):
            verb(lease)
    assert everything(db) == before


@pytest.mark.req("G14", "V9")
def test_a_revoked_lease_is_lost(c: Custody, db: psycopg.Connection) -> None:
    start(c, 4)
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    c.rewind(TOPIC, GROUP, to_offset=2)
    with pytest.raises(LeaseLost) as lost:
        lease.ack(lease.messages)
    assert lost.value.lost == (2, 3)
    with pytest.raises(LeaseLost):
        lease.ack()
    assert [(m.offset, m.attempt) for m in drain(c)] == [(2, 1), (3, 1)]


@pytest.mark.req("K2")
def test_a_later_message_of_a_key_is_not_resolved_before_an_earlier_one(c: Custody, db: psycopg.Connection) -> None:
    start(c, policy=Policy(ordering="key"), keys="abab")
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    before = everything(db)
    a0, b0, a1, b1 = lease.messages
    with pytest.raises(OrderConflict, match="offset 2 cannot be resolved before offset 0"):
        lease.ack(a1)
    with pytest.raises(OrderConflict):
        lease.nack(a1, requeue=False)
    with pytest.raises(OrderConflict):
        c.settle(lease.lease_id, {0: Outcome("nack"), 1: Outcome("ack"), 2: Outcome("ack")})
    assert everything(db) == before
    lease.ack(a0, a1)
    lease.ack(b0)
    lease.ack(b1)


def test_without_order_anything_may_be_settled_first(c: Custody) -> None:
    start(c, keys="aaa")
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.ack(lease.messages[2])
    assert lease.nack(lease.messages[0]).released == ()
    assert lease.ack().settled == 1


def test_an_error_is_kept_whatever_it_contains(c: Custody, db: psycopg.Connection) -> None:
    start(c, 3, Policy(max_attempts=1))
    for text in ("a\0b", "half \ud83e", "long" * 5000):
        assert c.claim(TOPIC, GROUP).nack(error=text).dead
    errors = [letter.last_error for letter in c.dead(TOPIC, GROUP)]
    assert errors[:2] == ["a\ufffdb", "half ?"]
    assert errors[2] is not None
    assert len(errors[2]) == LONGEST_ERROR
    assert db.execute("SELECT length(custody.kept_error(repeat('x', 20000)))").fetchone() == (LONGEST_ERROR,)


@pytest.mark.parametrize("size", [800, pytest.param(2000, marks=pytest.mark.long)])
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_big_lease_settled_piece_by_piece_stays_right(
    c: Custody, db: psycopg.Connection, clock: Clock, ordering: str, size: int
) -> None:
    chosen = random.Random(11)
    policy = Policy.from_mapping({"ordering": ordering, "backoff": {"kind": "constant", "initial": "1s"}})
    start(c, policy=policy, keys=[f"k{n}" for n in range(size)])
    lease = c.claim(TOPIC, GROUP, max_messages=size)
    left = set(range(size))
    acked, nacked, released = set[int](), set[int](), set[int]()
    for offset in chosen.sample(range(size), size * 3 // 10):
        verb, done = chosen.choice([(c.ack, acked)] * 8 + [(c.nack, nacked), (c.release, released)])
        verb(lease.lease_id, [offset])
        done.add(offset)
        left.discard(offset)
        if chosen.random() < 0.02 and nacked | released:
            with pytest.raises(LeaseLost):
                c.ack(lease.lease_id, [chosen.choice(sorted(nacked | released))])
        if chosen.random() < 0.02 and acked:
            assert c.ack(lease.lease_id, [chosen.choice(sorted(acked))]) == Settled(settled=1, already=True)
        if chosen.random() < 0.02:
            stats = c.stats(TOPIC, GROUP)
            assert (stats.in_flight, stats.waiting) == (len(left), len(nacked) + len(released))
    rows = db.execute("SELECT max(remaining), sum(remaining), count(DISTINCT lease_id) FROM custody.leases").fetchone()
    assert rows is not None
    assert rows[0] <= 256, "the lease was split"
    assert rows[1:] == (len(left), 1)
    assert c.ack(lease.lease_id, sorted(left)[:500]).settled == 500
    assert lease.ack().settled == len(left) - 500
    clock.move(1)
    again = drain(c, max_messages=500)
    assert sorted(offsets(again)) == sorted(nacked | released)
    assert {m.offset: m.attempt for m in again} == dict.fromkeys(nacked, 2) | dict.fromkeys(released, 1)
    assert c.stats(TOPIC, GROUP).depth == 0


WHOLE = [name for name in VERBS if not name.endswith(" one")]


def lose_by_rewind(c: Custody, lease: Lease, clock: Clock) -> None:
    c.rewind(TOPIC, GROUP, to_offset=4)


def lose_by_expiry(c: Custody, lease: Lease, clock: Clock) -> None:
    for message in lease.messages[:4]:
        lease.extend("5m", message=message)
    clock.move(31)


def lose_to_another(c: Custody, lease: Lease, clock: Clock) -> None:
    lose_by_expiry(c, lease, clock)
    assert c.claim(TOPIC, GROUP)


@pytest.mark.req("X1")
@pytest.mark.parametrize("lose", [lose_by_rewind, lose_by_expiry, lose_to_another])
@pytest.mark.parametrize("verb", WHOLE)
def test_a_whole_lease_settle_names_what_was_lost_and_settles_the_rest(
    c: Custody, clock: Clock, verb: str, lose: Callable[[Custody, Lease, Clock], None]
) -> None:
    start(c, 6)
    lease = c.claim(TOPIC, GROUP, max_messages=6)
    lose(c, lease, clock)
    with pytest.raises(LeaseLost, match="offsets 4, 5") as lost:
        VERBS[verb](lease)
    assert lost.value.lost == (4, 5)
    kind = c.trace(TOPIC, 0, 0)[-1].kind
    assert kind == verb
    with pytest.raises(LeaseLost) as lost:  # it stays lost
        VERBS[verb](lease)
    assert lost.value.lost == (4, 5)
    assert all(entry.kind != verb for entry in c.trace(TOPIC, 0, 4) if entry.kind != "extend")


@pytest.mark.req("X1")
@pytest.mark.parametrize("verb", WHOLE)
def test_what_the_holder_has_settled_itself_does_not_count_as_lost(c: Custody, clock: Clock, verb: str) -> None:
    start(c, 12)
    lease = c.claim(TOPIC, GROUP, max_messages=12)
    first, second, third, fourth, *_ = lease.messages
    lease.ack(first)
    lease.nack(second, error="x")
    lease.release(third)
    lease.later(fourth, after="1m")
    lease.nack(lease.messages[4], requeue=False)
    lease.extend("2m", message=lease.messages[5])
    done = VERBS[verb](lease)
    if verb != "extend":
        assert done.settled == 7
    assert c.trace(TOPIC, 0, 11)[-1].kind == verb


@pytest.mark.req("X1")
def test_what_a_key_took_along_does_not_count_as_lost(c: Custody) -> None:
    start(c, policy=Policy(ordering="key"), keys=["a", "a", "b", "a"])
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    assert lease.nack(lease.messages[0]).released == (1, 3)
    assert lease.ack() == Settled(settled=1)


@pytest.mark.req("X1")
@pytest.mark.parametrize("settled", [1, 300])
def test_a_lease_that_was_split_is_exact_too(c: Custody, settled: int) -> None:
    """Its rows are counted together, whichever of them were settled whole or taken away."""
    start(c, 1200)
    lease = c.claim(TOPIC, GROUP, max_messages=1200)
    for n in range(0, 600, 600 // settled):
        lease.ack(lease.messages[n])
    c.ack(lease.lease_id, range(200, 600))
    c.rewind(TOPIC, GROUP, to_offset=1000)
    with pytest.raises(LeaseLost) as lost:
        lease.ack()
    assert lost.value.lost == tuple(range(1000, 1200))
    assert c.stats(TOPIC, GROUP).depth == 200


@pytest.mark.req("X1")
def test_a_loss_that_the_journal_has_forgotten_is_refused_as_a_whole(c: Custody, db: psycopg.Connection) -> None:
    start(c, 3)
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    c.rewind(TOPIC, GROUP, to_offset=2)
    db.execute("DELETE FROM custody.journal")
    before = everything(db)
    with pytest.raises(LeaseLost, match="does not go back to its claim"):
        lease.ack()
    assert everything(db) == before
    assert lease.ack(lease.messages[:2]).settled == 2


@pytest.mark.req("G5")
@pytest.mark.parametrize("verb", [name for name in VERBS if not name.startswith("extend")])
def test_a_repeat_is_a_success_and_changes_nothing(c: Custody, db: psycopg.Connection, verb: str) -> None:
    start(c, 2)
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    first = VERBS[verb](lease)
    before = everything(db)
    again = VERBS[verb](lease)
    assert (again.settled, again.dead, again.already) == (first.settled, first.dead, True)
    assert not first.already
    assert everything(db) == before


@pytest.mark.req("G5")
def test_a_repeat_tells_again_what_left_the_lease_with_its_key(c: Custody) -> None:
    start(c, policy=Policy(ordering="key"), keys=["a", "a", "b", "a"])
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    assert lease.nack(lease.messages[0]).released == (1, 3)
    assert lease.nack(lease.messages[0]) == Settled(settled=1, released=(1, 3), already=True)


@pytest.mark.req("G5")
@pytest.mark.parametrize("whole", [True, False])
def test_a_repeat_of_what_the_breaker_put_off_is_a_success(c: Custody, db: psycopg.Connection, whole: bool) -> None:
    """While the breaker is open a nack is put off and not charged; it is a nack all the same."""
    start(c, 9, Policy(breaker=Breaker(min_outcomes=4)))
    lease = c.claim(TOPIC, GROUP, max_messages=5)
    c.claim(TOPIC, GROUP, max_messages=4).nack()
    assert c.claim(TOPIC, GROUP).reason == "breaker_open"
    lease.later(lease.messages[0], after=1)
    named = [] if whole else [lease.messages[1:]]
    assert lease.nack(*named) == Settled(settled=4)
    before = everything(db)
    assert lease.nack(*named) == Settled(settled=4, already=True)
    assert lease.later(lease.messages[0], after=1) == Settled(settled=1, already=True)
    with pytest.raises(LeaseLost):
        lease.later(lease.messages[1], after=1)
    assert everything(db) == before


@pytest.mark.req("G5", "X1")
def test_what_a_claim_gave_back_for_its_size_was_never_in_the_lease(
    c: Custody, db: psycopg.Connection, clock: Clock
) -> None:
    start(c, 10)

    def claim() -> tuple[UUID, int]:
        rows = db.execute(
            f"SELECT lease ->> 'lease_id' FROM custody.claim('{TOPIC}', '{GROUP}', 10, p_bytes => 3, p_now => %s)",
            [clock.time],
        ).fetchall()
        return UUID(rows[0][0]), len(rows) - 1

    lease, size = claim()
    assert 0 < size < 10
    assert c.ack(lease).settled == size
    with pytest.raises(LeaseLost):
        c.release(lease)
    lease, size = claim()
    assert c.release(lease) == Settled(settled=size)
    assert c.release(lease) == Settled(settled=size, already=True)


@pytest.mark.req("G5", "G14")
def test_a_repeat_is_told_from_a_loss(c: Custody, clock: Clock) -> None:
    start(c, 3, policy=Policy(max_attempts=1))
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.ack(lease.messages[0])
    c.rewind(TOPIC, GROUP, to_offset=0)  # also what was acknowledged is to be delivered again
    with pytest.raises(LeaseLost) as lost:
        lease.ack(lease.messages)
    assert lost.value.lost == (1, 2)
    with pytest.raises(LeaseLost):
        lease.nack(lease.messages[0])
    alone = c.claim(TOPIC, GROUP)
    clock.move(31)
    assert [letter.offset for letter in c.dead(TOPIC, GROUP)] == [] and c.claim(TOPIC, GROUP)  # noqa: PT018
    with pytest.raises(LeaseLost):  # it has died of its lease, not by this
        alone.nack(requeue=False)


@pytest.mark.req("V4")
def test_a_message_that_fails_for_too_long_is_dead_with_attempts_left(c: Custody, clock: Clock) -> None:
    start(c, 2, Policy(max_attempts=100, retry_for="1h", backoff=Constant("20m")))
    failed = []
    for _ in range(5):
        lease = c.claim(TOPIC, GROUP, max_messages=2)
        failed += offsets(lease)
        if lease:
            lease.nack(error="down")
        clock.move(20 * 60)
    assert failed == [0, 1] * 4, "at once, and after 20, 40 and 60 minutes"
    assert [(letter.attempts, letter.reason) for letter in c.dead(TOPIC, GROUP)] == [(4, "max_retries_exceeded")] * 2
    c.redrive(TOPIC, GROUP)
    c.claim(TOPIC, GROUP, max_messages=2).nack(error="down")
    assert c.stats(TOPIC, GROUP).waiting == 2, "a redrive gives all of the time again"


@pytest.mark.req("V12", "V3", "K2")
def test_a_skip_counts_as_done_lets_its_key_go_on_and_leaves_its_reason(c: Custody) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering="key", on_dead="hold", max_attempts=1))
    c.publish_many(TOPIC, [Outgoing(n, key="k") for n in range(4)])
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.nack(lease.messages[0], error="not now")
    c.redrive(TOPIC, GROUP)
    retried = c.claim(TOPIC, GROUP)
    assert retried.skip(reason="cancelled").settled == 1
    rest = c.claim(TOPIC, GROUP, max_messages=3)
    assert offsets(rest) == [1, 2, 3], "the key goes on"
    with pytest.raises(OrderConflict):  # as with an ack
        c.settle(rest.lease_id, {2: Outcome("skip")})
    told = {1: Outcome("skip", error="paid"), 2: Outcome("skip", error="sold"), 3: Outcome("ack")}
    assert c.settle(rest.lease_id, told).settled == 3
    last = [c.trace(TOPIC, 0, offset)[-1] for offset in range(4)]
    assert [(entry.kind, entry.error) for entry in last] == [
        ("skip", "cancelled"),
        ("skip", "paid"),
        ("skip", "sold"),
        ("ack", None),
    ]
    assert (last[1].attempt, last[1].lease_id) == (1, rest.lease_id)
    stats = c.stats(TOPIC, GROUP)
    assert (stats.depth, stats.dead, stats.waiting) == (0, 0, 0)


@pytest.mark.req("N2")
def test_a_lease_is_known_by_its_whole_id(c: Custody) -> None:
    """The number of its claim is a part of it, and can be guessed; the rest cannot."""
    start(c, 2)
    lease = c.claim(TOPIC, GROUP)
    lease.ack()
    with pytest.raises(LeaseLost) as lost:
        c.ack(UUID(int=lease.lease_id.int ^ 1))
    assert lost.value.lost == ()
    assert c.ack(lease.lease_id).already


@pytest.mark.req("X1")
def test_what_another_lease_has_settled_is_lost_to_the_first(c: Custody) -> None:
    start(c, 2)
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    c.rewind(TOPIC, GROUP, to_offset=1)
    c.claim(TOPIC, GROUP).ack()
    lease.ack(lease.messages[0])
    with pytest.raises(LeaseLost) as lost:
        lease.ack()
    assert lost.value.lost == (1,)
