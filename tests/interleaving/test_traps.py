"""The traps that the review of the core found, each by its number; those about locks stand with their verbs."""

from __future__ import annotations

import psycopg
import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session

import custody

pytestmark = pytest.mark.core


@pytest.mark.req("K2")
def test_trap_1_1_a_parked_follower_does_not_overtake(make: Make, one: Session, two: Session, three: Session) -> None:
    """K@0 is with the first, K@2 was parked by the second: the third must not get it."""
    make("KaKb")
    first = one.claim(2)
    assert first.offsets == [0, 1]
    one.commit()
    assert two.claim(9).offsets == [3]
    two.commit()
    assert three.claim(9).reason in ("empty", "busy")
    three.commit()
    one.ack_lease(first.lease_id)
    one.commit()
    assert three.claim(9).offsets == [2]


@pytest.mark.req("K2")
def test_trap_1_2_a_returned_range_goes_before_what_waits_behind_it(
    make: Make, one: Session, two: Session, clock: Clock
) -> None:
    """K@0 expires; K@2 was parked and nothing of its key is in flight any more, but K@0 comes first."""
    make("KaKb")
    one.claim(2, visibility=5)
    one.commit()
    lease = two.claim(9)
    assert lease.offsets == [3]
    two.ack_lease(lease.lease_id)
    two.commit()
    clock.move(6)
    again = two.claim(9)
    assert again.attempts == {0: 2}
    two.commit()
    assert one.claim(9).attempts == {1: 2}
    one.commit()
    assert one.claim(9).reason in ("empty", "busy")
    one.commit()
    two.ack_lease(again.lease_id)
    assert two.claim(9).attempts == {2: 1}


@pytest.mark.req("V1")
def test_trap_1_4_what_was_returned_is_not_done(make: Make, c: custody.Custody, one: Session, clock: Clock) -> None:
    make("abcd", ordering="none")
    one.claim(4, visibility=5)
    one.commit()
    clock.move(6)
    assert one.claim(1).attempts == {0: 2}
    one.commit()
    stats = c.stats(TOPIC, GROUP)
    assert (stats.waiting, stats.in_flight, stats.depth) == (3, 1, 4)
    assert one.connection.execute(
        "SELECT count(*), count(*) FILTER (WHERE status = 'ready') FROM custody.deliveries"
    ).fetchone() == (4, 3)


@pytest.mark.req("N2")
def test_trap_1_6_an_offset_that_was_never_leased_changes_nothing(make: Make, c: custody.Custody, one: Session) -> None:
    make("abcd")
    lease = one.claim(2)
    for outcome in ("ack", "nack", "dead", "later", "release"):
        settled = one.settle(lease.lease_id, {3: outcome})
        assert (settled.settled, settled.lost) == (0, [3])
    # one that is held and one that is not: the first is settled, the second is lost, the unnamed stays leased
    settled = one.settle(lease.lease_id, {0: "ack", 3: "nack"})
    assert (settled.settled, settled.lost) == (1, [3])
    one.commit()
    stats = c.stats(TOPIC, GROUP)
    assert (stats.in_flight, stats.lag, stats.waiting) == (1, 2, 0)
    assert one.claim(9).offsets == [2, 3]


@pytest.mark.req("K2", "K4")
def test_trap_1_7_followers_leave_the_lease_with_the_message_that_failed(
    make: Make, one: Session, clock: Clock
) -> None:
    make("KaK")
    lease = one.claim(3)
    with pytest.raises(psycopg.Error) as refused:
        one.settle(lease.lease_id, {0: "nack", 2: "ack"})
    assert refused.value.diag.message_detail == "order_conflict"
    one.rollback()
    lease = one.claim(3)
    outcome = one.nack(lease.lease_id, 0, delay=5)
    assert outcome.released == [2]
    assert one.ack(lease.lease_id, 2).lost == [2]
    assert one.ack(lease.lease_id, 1).lost == []
    one.commit()
    clock.move(5)
    retry = one.claim(9)
    assert retry.attempts == {0: 2}
    one.ack_lease(retry.lease_id)
    assert one.claim(9).attempts == {2: 1}


@pytest.mark.req("C2", "G14")
def test_trap_1_11_a_late_settle_is_lost_folded_or_not(
    make: Make, c: custody.Custody, one: Session, clock: Clock
) -> None:
    make("ab")
    lease = one.claim(2, visibility=5)
    one.commit()
    clock.move(5)  # at the deadline is too late
    assert one.ack(lease.lease_id, 0, 1).lost == [0, 1]
    assert one.ack_lease(lease.lease_id).settled == 0
    assert one.extend(lease.lease_id, 30) is None
    assert one.extend(lease.lease_id, 30, offset=0) is None
    one.commit()
    assert c.stats(TOPIC, GROUP).waiting == 2
    assert one.claim(1).attempts == {0: 2}
    assert one.ack(lease.lease_id, 0, 1).lost == [0, 1]


def test_trap_1_14_a_failed_message_without_a_key_is_retried(make: Make, one: Session, clock: Clock) -> None:
    make([None, "K", None])
    lease = one.claim(3)
    one.settle(lease.lease_id, {0: "nack", 1: "ack", 2: "nack"}, delay=1)
    clock.move(1)
    assert one.claim(9).attempts == {0: 2, 2: 2}


@pytest.mark.req("K1", "N10")
def test_trap_1_15a_followers_of_a_blocked_key_do_not_crowd_out_others(
    make: Make, one: Session, two: Session, clock: Clock
) -> None:
    make(["K", "other", *["K"] * 500])
    first = one.claim(2)
    one.settle(first.lease_id, {0: "nack", 1: "nack"}, delay=1)
    one.commit()
    assert one.claim(500).offsets == []  # parks all 500
    one.commit()
    clock.move(1)
    retries = one.claim(1)
    one.commit()
    others = two.claim(5)
    two.commit()
    assert sorted(retries.offsets + others.offsets) == [0, 1]


@pytest.mark.req("K1")
def test_trap_1_15b_parked_followers_do_not_attract_claims(make: Make, c: custody.Custody, one: Session) -> None:
    """Beside a partition full of followers every claim finds the fresh work of the other one."""
    make(["K"] * 100, partitions=2)
    one.claim(1, partition=0)
    one.commit()
    one.claim(100, partition=0)  # parks the rest
    one.commit()
    c.publish_many(TOPIC, [custody.Outgoing(n, partition=1) for n in range(50)])
    for _ in range(50):
        claimed = one.claim(1)
        assert (claimed.partition, len(claimed.offsets)) == (1, 1)
        one.commit()


@pytest.mark.req("C6")
def test_trap_1_15c_busy_is_not_empty(make: Make, one: Session, two: Session, three: Session) -> None:
    make("ab")
    one.claim(1)
    assert two.claim(1).reason == "busy"  # somebody is at it: come back
    two.rollback()
    one.commit()
    assert three.claim(1).offsets == [1]
    three.commit()
    assert two.claim(1).reason == "empty"  # there is nothing


@pytest.mark.req("C2")
def test_trap_1_15d_an_expired_lease_makes_its_partition_a_candidate(make: Make, one: Session, clock: Clock) -> None:
    make("a")
    one.claim(1, visibility=5)
    one.commit()
    assert one.claim(1).reason == "empty"
    one.commit()
    clock.move(5)
    assert one.claim(1).attempts == {0: 2}


@pytest.mark.req("K4")
@pytest.mark.parametrize("commit_first", ["settle", "claim"])
@pytest.mark.parametrize("outcome", ["ack", "nack", "dead", "later", "release"])
@pytest.mark.parametrize("retried", [False, True], ids=["fresh", "case"])
def test_trap_1_15_no_wake_up_is_lost_between_a_settle_and_a_claim_that_parks(
    make: Make, one: Session, two: Session, clock: Clock, commit_first: str, outcome: str, retried: bool
) -> None:
    """K@0 is being settled while a claim parks K@1 behind it: whoever commits first, K@1 comes in the end."""
    make("K", max_attempts=5)
    lease = one.claim(1)
    if retried:
        one.nack(lease.lease_id, 0, delay=0)
        lease = one.claim(1)
        assert lease.attempts == {0: 2}
    one.commit()
    one.publish(["K"])
    one.commit()

    def settle() -> None:
        assert one.settle(lease.lease_id, {0: outcome}, delay=1).settled == 1

    if commit_first == "settle":
        settle()
        assert two.claim(9).offsets == []  # parks K@1 on what it sees: the lease
        one.commit()
        two.commit()
    else:
        assert two.claim(9).offsets == []
        settle()  # does not wait, and cannot see what is being parked
        two.commit()
        one.commit()
    clock.move(2)
    done = []
    for _ in range(6):
        claimed = two.claim(9)
        if claimed.offsets:
            done += claimed.offsets
            two.ack_lease(claimed.lease_id)
        two.commit()
    assert done == ([1] if outcome in ("ack", "dead") else [0, 1])
