"""Claims side by side on one partition: never the same message twice, never a wait without an answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session

import custody
from custody.errors import TopicNotFound

pytestmark = pytest.mark.core


@pytest.mark.req("C1", "V5")
def test_second_claim_waits_a_little_and_answers_busy(make: Make, one: Session, two: Session) -> None:
    make("abcd")
    assert one.claim(2).offsets == [0, 1]
    assert two.claim(2).reason == "busy"
    two.commit()
    one.commit()
    assert two.claim(2).offsets == [2, 3]


def test_trap_1_10_a_claim_that_waited_sees_the_lease_of_the_other(make: Make, one: Session, two: Session) -> None:
    make("KaKb")
    assert one.claim(2).offsets == [0, 1]
    waiting = two.blocked(two.claim, 4)
    one.commit()
    # K is in flight with the first: its second message is parked, not handed out
    assert waiting.result(10).offsets == [3]


def test_a_claim_that_waited_for_a_rolled_back_one_gets_its_messages(make: Make, one: Session, two: Session) -> None:
    make("ab")
    one.claim(2)
    waiting = two.blocked(two.claim, 2)
    one.rollback()
    assert waiting.result(10).attempts == {0: 1, 1: 1}


def test_busy_leaves_the_callers_lock_timeout_alone(make: Make, one: Session, two: Session) -> None:
    make("ab")
    two.connection.execute("SET LOCAL lock_timeout = '7s'")
    one.claim(1)
    assert two.claim(1).reason == "busy"
    assert two.connection.execute("SHOW lock_timeout").fetchone() == ("7s",)
    one.commit()
    assert two.claim(1).offsets == [1]
    assert two.connection.execute("SHOW lock_timeout").fetchone() == ("7s",)


def test_a_locked_partition_does_not_hide_another_with_work(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("a", partitions=2)
    c.publish(TOPIC, 1, partition=1)
    assert one.claim(1, partition=0).offsets == [0]
    other = two.claim(1)
    assert (other.partition, other.offsets) == (1, [0])


def test_four_claimants_get_every_message_once(make: Make, c: custody.Custody) -> None:
    make([f"k{n % 50}" for n in range(400)], max_in_flight=None)
    reasons: list[str | None] = []

    def work() -> list[int]:
        mine: list[int] = []
        for _ in range(2000):
            lease = c.claim(TOPIC, GROUP, max_messages=7)
            if not lease:
                reasons.append(lease.reason)
                if c.stats(TOPIC, GROUP).depth == 0:
                    return mine
                continue
            mine += [message.offset for message in lease]
            lease.ack()
        raise AssertionError(f"the group does not come to an end: {c.stats(TOPIC, GROUP)}")

    with ThreadPoolExecutor(4) as threads:
        done = [offset for worker in [threads.submit(work) for _ in range(4)] for offset in worker.result(60)]
    assert sorted(done) == list(range(400))
    assert set(reasons) <= {"busy", "empty"}


def test_claim_during_an_open_ack_takes_the_next_messages(make: Make, one: Session, two: Session) -> None:
    make("abcd")
    lease = one.claim(2)
    one.commit()
    one.ack_lease(lease.lease_id)
    assert two.claim(2).offsets == [2, 3]


def test_claim_during_an_open_nack_holds_the_key_back(make: Make, one: Session, two: Session, clock: Clock) -> None:
    """Before the commit the lease holds the key, after it the case does: there is no moment in between."""
    make("KaKb")
    lease = one.claim(1)
    one.commit()
    one.nack(lease.lease_id, 0, delay=5)
    assert two.claim(9).offsets == [1, 3]
    two.commit()
    one.commit()
    assert two.claim(9).reason == "empty"
    two.commit()
    clock.move(5)
    retry = two.claim(9)
    assert retry.attempts == {0: 2}
    two.ack_lease(retry.lease_id)
    assert two.claim(9).offsets == [2]


def test_trap_1_8_settle_during_an_open_claim_does_not_wait(make: Make, one: Session, two: Session) -> None:
    make("abcd")
    lease = one.claim(2)
    one.commit()
    two.claim(1)  # holds the cursor
    assert one.settle(lease.lease_id, {0: "ack", 1: "release"}).settled == 2
    one.commit()


def test_claim_behind_delete_group_ends_with_a_clear_error(make: Make, one: Session, two: Session) -> None:
    make("ab")
    one.call("delete_group", topic=TOPIC, group=GROUP)
    waiting = two.blocked(two.claim, 1)
    one.commit()
    assert waiting.result(10).reason == "busy"
    two.commit()
    with pytest.raises(psycopg.Error) as refused:
        two.claim(1)
    assert refused.value.diag.message_detail == "group_not_found"


def test_delete_group_waits_for_a_claim_and_its_ack_is_lost(make: Make, one: Session, two: Session) -> None:
    make("ab")
    lease = one.claim(1)
    deleting = two.blocked(two.call, "delete_group", topic=TOPIC, group=GROUP)
    one.commit()
    deleting.result(10)
    two.commit()
    assert one.ack(lease.lease_id, 0).lost == [0]


@pytest.mark.parametrize("verb", ["delete_group", "delete_topic"])
def test_deleting_beside_an_open_settle_does_not_deadlock(
    make: Make, one: Session, two: Session, verb: str, c: custody.Custody
) -> None:
    """A settle locks its lease and then refers to the group; the deletion has to take them in the same order."""
    make("ab")
    lease = one.claim(2)
    one.commit()
    one.ack(lease.lease_id, 0)
    named: dict[str, Any] = {"group": GROUP} if verb == "delete_group" else {}
    deleting = two.blocked(two.call, verb, topic=TOPIC, **named)
    assert one.nack(lease.lease_id, 1).settled == 1
    one.commit()
    deleting.result(10)
    two.commit()
    assert GROUP not in [group.name for topic in c.topics() for group in c.groups(topic.name)]


def test_claim_beside_delete_topic_is_never_a_raw_error(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("ab")
    one.call("delete_topic", topic=TOPIC)  # holds the tables of the log
    waiting = two.blocked(two.claim, 1)
    one.commit()
    assert waiting.result(10).reason == "busy"
    two.commit()
    with pytest.raises(TopicNotFound):
        c.claim(TOPIC, GROUP)


@pytest.mark.req("N10", "V5")
def test_fair_claims_side_by_side(make: Make, one: Session, two: Session) -> None:
    """What the first one parks behind its own lease the second one does not hand out, and others it does."""
    make("FFFFFFFFab", fairness="key")
    assert one.claim(2).offsets == [0, 8]  # one of F and one of a: the rest is parked
    waiting = two.blocked(two.claim, 2)
    one.commit()
    assert waiting.result(10).offsets == [9]
    two.commit()
    assert two.claim(2).reason == "empty"
    two.rollback()


@pytest.mark.req("N10", "V5")
def test_a_fair_claim_that_is_rolled_back_has_parked_nothing(make: Make, one: Session, two: Session) -> None:
    make("FFFFFFFFab", fairness="key")
    one.claim(2)
    waiting = two.blocked(two.claim, 2)
    one.rollback()
    assert waiting.result(10).offsets == [0, 8]
