"""Transactions of producers between sessions: what others see, and who waits for whom."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session

import custody
from custody import Outgoing
from custody.model.placement import partition_for

pytestmark = [pytest.mark.core, pytest.mark.req("G12")]


def begun(c: custody.Custody, *topics: str, producer: str = "p") -> UUID:
    """A transaction with one message for each topic."""
    c.init_producer(producer)
    transaction_id, _ = c.transactions.begin(producer, epoch=None, timeout=None)
    for topic in topics:
        c.transactions.add(transaction_id, topic, [Outgoing(producer, key="k", partition=0)])
    return transaction_id


def commit(session: Session, transaction_id: UUID) -> list[tuple[Any, ...]]:
    return session.call("commit_transaction", transaction=transaction_id)


def test_others_see_nothing_of_it_and_go_on_behind_it(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("ab")
    c.create_topic("bills")
    transaction_id = begun(c, TOPIC, "bills")
    assert [row[:3] for row in commit(one, transaction_id)] == [(TOPIC, 0, 2), ("bills", 0, 0)]
    assert (len(c.read(TOPIC)), len(c.read("bills"))) == (2, 0)
    publish = two.blocked(two.publish, ["c"])
    one.commit()
    assert publish.result(10) == [(0, 3)]
    two.commit()
    assert (len(c.read(TOPIC)), len(c.read("bills"))) == (4, 1)


def test_a_crash_before_the_database_commits_leaves_no_gap(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("ab")
    transaction_id = begun(c, TOPIC)
    commit(one, transaction_id)
    publish = two.blocked(two.publish, ["c"])
    one.rollback()
    assert publish.result(10) == [(0, 2)]
    two.commit()
    assert c.transactions.commit(transaction_id) == [custody.Receipt(TOPIC, 0, 3)]


def test_two_commits_of_one_happen_once(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make()
    transaction_id = begun(c, TOPIC)
    first = commit(one, transaction_id)
    second = two.blocked(commit, two, transaction_id)
    one.commit()
    assert second.result(10) == first
    two.commit()
    assert c.topic(TOPIC).message_count == 1


def test_a_takeover_waits_for_the_commit_that_it_would_fence(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make()
    transaction_id = begun(c, TOPIC)
    commit(one, transaction_id)
    takeover = two.blocked(two.call, "init_producer", producer="p")
    one.commit()
    assert takeover.result(10)[0][1] == 2
    two.commit()


def test_a_commit_waits_for_the_takeover_and_is_fenced(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make()
    transaction_id = begun(c, TOPIC)
    one.call("init_producer", producer="p")
    late = two.blocked(commit, two, transaction_id)
    one.commit()
    with pytest.raises(psycopg.DatabaseError, match="epoch"):
        late.result(10)
    assert c.topic(TOPIC).message_count == 0


def test_topics_in_another_order_do_not_deadlock(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make()
    c.create_topic("bills")
    ours, theirs = begun(c, TOPIC, "bills"), begun(c, "bills", TOPIC, producer="q")
    commit(one, ours)
    second = two.blocked(commit, two, theirs)
    one.commit()
    assert [row[:3] for row in second.result(10)] == [("bills", 0, 1), (TOPIC, 0, 1)]
    two.commit()


def test_an_ack_in_it_waits_for_another_settle_of_the_lease(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("ab")
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    transaction_id = begun(c)
    c.transactions.ack(transaction_id, lease.lease_id, [0])
    one.ack(lease.lease_id, 0)
    late = two.blocked(commit, two, transaction_id)
    one.commit()
    with pytest.raises(psycopg.DatabaseError, match="does not hold"):
        late.result(10)


def test_adding_waits_for_the_commit_and_is_refused(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make()
    transaction_id = begun(c, TOPIC)
    commit(one, transaction_id)
    late = two.blocked(two.call, "ack_in_transaction", transaction=transaction_id, lease_id=transaction_id)
    one.commit()
    with pytest.raises(psycopg.DatabaseError, match="was committed"):
        late.result(10)


def test_the_time_of_a_transaction_begins_after_the_wait_for_its_producer(
    c: custody.Custody, one: Session, two: Session
) -> None:
    c.init_producer("p")
    one.connection.execute("SELECT FROM custody.producers FOR UPDATE")
    beginning = two.blocked(two.call, "begin_transaction", producer="p", timeout=timedelta(seconds=5))
    unlocked = one.connection.execute("SELECT clock_timestamp()").fetchall()[0][0]
    one.commit()
    beginning.result(10)
    two.commit()
    times = one.connection.execute("SELECT begun_at, expires_at FROM custody.transactions").fetchall()[0]
    assert times[0] >= unlocked
    assert times[1] >= unlocked + timedelta(seconds=5)


def test_a_commit_that_waited_for_growth_places_its_messages_anew(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make()
    transaction_id = begun(c)
    c.transactions.add(transaction_id, TOPIC, [Outgoing(1, key="k")])
    one.call("grow_topic", topic=TOPIC, partitions=4)
    committing = two.blocked(commit, two, transaction_id)
    one.commit()
    assert [row[:3] for row in committing.result(10)] == [(TOPIC, partition_for("k", 4), 0)]


CLEARED = {
    "open": ("'open', NULL", 10),
    "aborted": ("'aborted', '2030-01-01'::timestamptz + n * interval '1 s'", 100),
}


def old_transactions(c: custody.Custody, session: Session, state: str, count: int) -> None:
    """The later they have to be cleared, the earlier they were written."""
    c.init_producer("p")
    session.connection.execute(
        f"""INSERT INTO custody.transactions (producer_id, epoch, begun_at, expires_at, state, ended_at)
            SELECT 'p', n, '2030-01-01', '2030-01-01'::timestamptz + n * interval '1 s', {CLEARED[state][0]}
            FROM generate_series(%s, 1, -1) n""".encode(),
        [count],
    )
    session.commit()


def cleared(session: Session) -> int:
    return int(session.call("clear_transactions", now=datetime(2030, 2, 1, tzinfo=UTC))[0][0])


@pytest.mark.parametrize("state", CLEARED)
def test_two_who_clear_old_ones_do_not_wait_for_one_another(
    c: custody.Custody, one: Session, two: Session, state: str
) -> None:
    old_transactions(c, one, state, 3)
    two.connection.execute("SET lock_timeout = '2s'")
    assert cleared(one) == 3
    assert cleared(two) == 0
    one.commit()


@pytest.mark.parametrize("state", CLEARED)
def test_the_oldest_are_cleared_first(c: custody.Custody, one: Session, state: str) -> None:
    most = CLEARED[state][1]
    old_transactions(c, one, state, most + 1)
    assert cleared(one) == most
    left = "SELECT epoch FROM custody.transactions WHERE (reason IS NULL AND state = 'open') = %s"
    assert one.connection.execute(left, [state == "open"]).fetchall() == [(most + 1,)]
