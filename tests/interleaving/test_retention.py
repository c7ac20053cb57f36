"""Retention beside those who place a group on the log, or bring a message of it back."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import psycopg
import pytest
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session
from tests.interleaving.test_operators import kill
from tests.waiting import wait_for

import custody
from custody.errors import Busy, OffsetOutOfRange
from custody.store.postgres import translate

pytestmark = pytest.mark.core

POLICY = msgspec.json.encode(custody.Policy(ordering="key").columns()).decode()


def create_group(session: Session, name: str = "late", *, offset: int | None = None) -> None:
    """A group that starts at the first offset there is, or at the one named."""
    start = "earliest" if offset is None else "offset"
    session.call("create_group", topic=TOPIC, group=name, policy=POLICY, start=start, start_offset=offset)


def finish(one: Session) -> None:
    """Everything is done, and the segment sealed: ready to be dropped."""
    lease = one.claim(9)
    one.ack_lease(lease.lease_id)
    one.seal()
    one.commit()


def redrive_at_once(session: Session) -> list[tuple[int, int]]:
    redriven = session.redrive()
    session.commit()
    return redriven


@pytest.mark.req("V13")
def test_trap_1_13_create_group_waits_for_a_drop_and_starts_behind_it(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    """Trap 1.13: a group must not be placed on a segment that is about to go."""
    make("abc")
    finish(one)
    c.publish(TOPIC, 4, key="d", partition=0)
    assert [dropped for _, dropped, _, _ in one.drop()] == [True]
    creating = two.blocked(create_group, two)
    one.commit()
    creating.result(10)
    two.commit()
    assert two.claim(9, group="late").offsets == [3]


@pytest.mark.req("V13")
def test_trap_1_13_drop_waits_for_create_group_and_keeps_the_segment(make: Make, one: Session, two: Session) -> None:
    make("abc")
    finish(one)
    create_group(two)
    dropping = one.blocked(one.drop)
    two.commit()
    ((_, dropped, _, held_by),) = dropping.result(10)
    assert not dropped
    assert held_by == "group late, partition 0, offset 0"
    one.commit()
    assert two.claim(9, group="late").offsets == [0, 1, 2]


def test_create_group_at_an_offset_that_a_drop_removes_is_refused(make: Make, one: Session, two: Session) -> None:
    make("abc")
    finish(one)
    one.drop()
    creating = two.blocked(create_group, two, offset=1)
    one.commit()
    with pytest.raises(psycopg.Error) as refused:
        creating.result(10)
    assert refused.value.diag.message_detail == "offset_out_of_range"


@pytest.mark.req("V9", "V13")
def test_rewind_behind_a_drop_is_out_of_range(make: Make, one: Session, two: Session) -> None:
    make("abc")
    finish(one)
    one.drop()
    rewinding = two.blocked(two.rewind, 0)
    one.commit()
    with pytest.raises(psycopg.Error) as refused:
        rewinding.result(10)
    assert refused.value.diag.message_detail == "offset_out_of_range"


@pytest.mark.req("V9", "V13")
def test_drop_behind_a_rewind_keeps_the_segment(make: Make, one: Session, two: Session) -> None:
    make("abc")
    finish(one)
    two.rewind(1)
    dropping = one.blocked(one.drop)
    two.commit()
    ((_, dropped, _, held_by),) = dropping.result(10)
    assert not dropped
    assert held_by == "group stock, partition 0, offset 1"
    one.commit()
    assert two.claim(9).offsets == [1, 2]


@pytest.mark.req("V7", "V8")
def test_redrive_during_a_drop_still_finds_its_event(make: Make, one: Session, two: Session, three: Session) -> None:
    """A message redriven between the look at what is unresolved and the keeping of dead events would be in neither."""
    make("ab")
    kill(one, 0)
    finish(one)
    # the drop stops between its two looks
    three.connection.execute("LOCK TABLE custody.kept_events IN ACCESS EXCLUSIVE MODE")
    dropping = one.blocked(one.drop)
    redriving = two.start(redrive_at_once, two)
    wait_for(lambda: redriving.done() or two.waits(), "the redrive neither waits nor returns")
    three.commit()
    dropping.result(10)
    one.commit()
    assert redriving.result(10) == [(0, 0)]
    assert two.claim(9).attempts == {0: 1}


@pytest.mark.req("V7")
def test_drop_behind_an_open_redrive_keeps_the_segment(make: Make, one: Session, two: Session) -> None:
    make("ab")
    kill(one, 0)
    finish(one)
    assert two.redrive() == [(0, 0)]
    dropping = one.blocked(one.drop)
    two.commit()
    ((_, dropped, _, held_by),) = dropping.result(10)
    assert not dropped
    assert held_by == "group stock, partition 0, offset 0"


def test_drop_locks_partitions_in_order(make: Make, db: psycopg.Connection, one: Session, two: Session) -> None:
    """A publisher to two partitions takes them in order; a drop that took them as they lie would deadlock with it."""
    make("abc", partitions=2)
    finish(one)
    # partition 0 now lies behind partition 1 in the table
    db.execute("UPDATE custody.heads SET first_offset = first_offset WHERE partition = 0")
    one.publish(["d"], partitions=[0])
    two.connection.execute("SET LOCAL enable_indexscan = off; SET LOCAL enable_bitmapscan = off")
    dropping = two.blocked(two.drop)
    one.publish(["e"], partitions=[1])
    one.commit()
    assert [dropped for _, dropped, _, _ in dropping.result(10)] == [True]


def test_claim_during_a_drop_is_answered(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make("abc")
    finish(one)
    c.publish(TOPIC, 4, key="d", partition=0)
    one.drop()
    waiting = two.start(two.claim, 9)
    assert waiting.result(10).reason in (None, "busy")
    one.commit()


def test_settle_during_a_drop_does_not_wait(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make("abc")
    finish(one)
    c.publish(TOPIC, 4, key="d", partition=0)
    lease = two.claim(9)
    two.commit()
    one.drop()
    assert two.settle(lease.lease_id, {3: "nack"}).settled == 1


@pytest.mark.parametrize("look", ["read", "stats"])
def test_a_look_at_a_segment_that_goes_is_told_to_try_again(
    make: Make, c: custody.Custody, one: Session, two: Session, look: str
) -> None:
    """Who waits for the segment's table finds it gone: nothing is wrong, and a second look is right."""
    make("abc", on_dead="hold")
    lease = one.claim(9)
    one.ack_lease(lease.lease_id)
    one.commit()
    one.connection.execute("LOCK TABLE custody.log_1 IN ACCESS EXCLUSIVE MODE")
    looks: dict[str, Callable[[], object]] = {
        "read": lambda: c.read(TOPIC, offset=0),
        "stats": lambda: c.stats(TOPIC, GROUP),
    }
    looking = two.start(looks[look])
    wait_for(lambda: looking.done() or blocked_by(one), "the reader does not wait for the segment")
    one.seal()
    one.drop()
    one.commit()
    with pytest.raises(Busy):
        looking.result(10)
    if look == "stats":
        assert c.stats(TOPIC, GROUP).depth == 0
    else:
        with pytest.raises(OffsetOutOfRange):
            c.read(TOPIC, offset=0)


def blocked_by(session: Session) -> bool:
    """Whether anybody waits for this session."""
    row = session.connection.execute(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pg_backend_pid() = ANY (pg_blocking_pids(pid)))"
    ).fetchone()
    return row == (True,)


@pytest.mark.parametrize("verb", ["create_group", "seal", "drop", "rewind"])
def test_verb_behind_delete_topic_is_a_clear_error(make: Make, one: Session, two: Session, verb: str) -> None:
    make("a")
    one.call("delete_topic", topic=TOPIC)
    verbs: dict[str, Callable[[], object]] = {
        "create_group": lambda: create_group(two),
        "seal": two.seal,
        "drop": two.drop,
        "rewind": lambda: two.rewind(0),
    }
    waiting = two.blocked(verbs[verb])
    one.commit()
    with pytest.raises(psycopg.Error) as refused:
        waiting.result(10)
    assert refused.value.diag.message_detail == "topic_not_found"


def test_group_is_held_by_name(make: Make, one: Session, c: custody.Custody) -> None:
    make("abc")
    one.seal()
    ((_, dropped, _, held_by),) = one.drop()
    one.commit()
    assert not dropped
    assert held_by == f"group {GROUP}, partition 0, offset 0"


@pytest.mark.req("V13")
@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("SELECT * FROM custody.read('orders', 0)", None),
        ("SELECT * FROM custody.events_between('orders', 0, 0, 3)", None),
        ("SELECT custody.keys_of(h, '{[0,3)}') FROM custody.heads h", None),
        ("SELECT (custody.tail(h)).* FROM custody.heads h", (3, None)),
    ],
)
def test_who_reads_a_segment_that_is_dropped_is_told_to_try_again(
    make: Make, one: Session, two: Session, query: str, answer: tuple[int, None] | None
) -> None:
    """The functions that read a segment go with its table."""
    make("abc")
    finish(one)
    two.connection.execute(query)  # the session remembers plans
    two.rollback()
    two.isolation(psycopg.IsolationLevel.REPEATABLE_READ)
    two.connection.execute("SELECT FROM custody.topics")  # has its snapshot
    assert [dropped for _, dropped, _, _ in one.drop()] == [True]
    one.commit()
    if answer is not None:
        assert two.connection.execute(query).fetchone() == answer
        return
    with pytest.raises(psycopg.Error) as gone:
        two.connection.execute(query)
    assert isinstance(translate(gone.value), Busy)
