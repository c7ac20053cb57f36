"""Settles beside everything else: fenced by the lease's row, and never in the way of the partition."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import psycopg
import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session
from tests.waiting import wait_for

import custody

pytestmark = pytest.mark.core


@pytest.mark.req("C2", "G21")
def test_trap_1_9_open_ack_of_an_expired_lease_does_not_stall_the_claim(
    make: Make, one: Session, two: Session, clock: Clock
) -> None:
    """Trap 1.9: the fold skips a lease that somebody has locked, and counts it as live."""
    make("KaKb")
    lease = one.claim(2, visibility=30)
    one.commit()
    clock.move(29)
    one.ack(lease.lease_id, 0, 1)
    clock.move(2)
    later = two.claim(9)
    assert later.offsets == [3]  # K is still in flight for everybody else
    two.commit()
    one.commit()
    assert two.claim(9).attempts == {2: 1}


def test_rolled_back_ack_of_an_expired_lease_is_folded_by_the_next_claim(
    make: Make, one: Session, two: Session, clock: Clock
) -> None:
    make("ab")
    lease = one.claim(2)
    one.commit()
    clock.move(29)
    one.ack_lease(lease.lease_id)
    clock.move(2)
    assert two.claim(9).reason == "empty"
    two.commit()
    one.rollback()
    # a lease of two comes back in leases of one
    assert two.claim(9).attempts == {0: 2}


@pytest.mark.req("G21")
def test_ack_in_an_open_transaction_rolled_back_gives_everything_back(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("abcd")
    lease = one.claim(2)
    one.commit()
    one.settle(lease.lease_id, {0: "ack", 1: "nack"})
    assert two.claim(9).offsets == [2, 3]  # the partition flows meanwhile
    two.commit()
    one.rollback()
    assert c.stats(TOPIC, GROUP).in_flight == 4
    assert one.ack(lease.lease_id, 0, 1).lost == []
    one.commit()
    assert c.stats(TOPIC, GROUP).in_flight == 2


@pytest.mark.req("G21")
def test_ack_in_an_open_transaction_wins_when_it_commits(make: Make, one: Session, two: Session, clock: Clock) -> None:
    """It was in time when it was said; nobody could have the message meanwhile, and nobody gets it afterwards."""
    make("ab")
    lease = one.claim(2)
    one.commit()
    clock.move(29)
    one.ack(lease.lease_id, 0, 1)
    clock.move(60)
    assert two.claim(9).reason == "empty"
    two.commit()
    one.commit()
    assert two.claim(9).reason == "empty"


def test_second_settle_of_one_lease_loses(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make("ab")
    lease = one.claim(2)
    one.commit()
    one.settle(lease.lease_id, {0: "nack", 1: "ack"})
    second = two.blocked(two.settle, lease.lease_id, {0: "ack", 1: "nack"})
    one.commit()
    outcome = second.result(10)
    assert (outcome.settled, outcome.lost) == (0, [0, 1])
    two.commit()
    stats = c.stats(TOPIC, GROUP)
    assert (stats.waiting, stats.depth) == (1, 1)
    assert [entry.kind for entry in c.trace(TOPIC, 0, 0)] == ["claim", "nack"]


@pytest.mark.req("G5")
def test_a_whole_ack_that_waited_for_another_finds_that_it_was_done(make: Make, one: Session, two: Session) -> None:
    make("ab")
    lease = one.claim(2)
    one.commit()
    assert one.ack_lease(lease.lease_id).settled == 2
    second = two.blocked(two.ack_lease, lease.lease_id)
    one.commit()
    outcome = second.result(10)
    assert (outcome.settled, outcome.lost, outcome.already) == (2, [], [0, 1])
    two.commit()
    kinds = two.connection.execute("SELECT kind FROM custody.journal WHERE lease_id = %s", [lease.lease_id]).fetchall()
    assert kinds == [("claim",), ("ack",)]


@pytest.mark.req("N2")
def test_trap_1_10_settle_that_waited_while_the_lease_was_split_still_holds_its_messages(
    make: Make, one: Session, two: Session
) -> None:
    """A big lease that is settled piecemeal is split into other rows: who waited for the first row has to see those."""
    make([None] * 600)
    lease = one.claim(600)
    one.commit()
    assert one.ack(lease.lease_id, 300).settled == 1  # splits
    second = two.blocked(two.ack, lease.lease_id, 10, 590)
    one.commit()
    outcome = second.result(10)
    assert (outcome.settled, outcome.lost) == (2, [])


def test_whole_ack_that_waited_while_the_lease_was_split_takes_all_of_it(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make([None] * 600, ordering="none")
    lease = one.claim(600)
    one.commit()
    assert one.extend(lease.lease_id, 40, offset=599) is not None
    one.commit()
    assert one.ack(lease.lease_id, 300).settled == 1
    second = two.blocked(two.ack_lease, lease.lease_id)
    one.commit()
    assert second.result(10).settled == 599
    two.commit()
    assert c.stats(TOPIC, GROUP).depth == 0


def test_trap_1_10_order_conflict_is_seen_by_a_settle_that_waited_for_a_split(
    make: Make, one: Session, two: Session
) -> None:
    """K@0 is split off by an extension while somebody waits to ack K@2: it is still the earlier one of its key."""
    make("KaKb")
    lease = one.claim(4)
    assert lease.offsets == [0, 1, 2, 3]
    one.commit()
    one.extend(lease.lease_id, 60, offset=0)
    second = two.blocked(two.ack, lease.lease_id, 2)
    one.commit()
    with pytest.raises(psycopg.Error) as refused:
        second.result(10)
    assert refused.value.diag.message_detail == "order_conflict"


def test_extension_that_waited_does_not_bring_back_what_was_acked(make: Make, one: Session, two: Session) -> None:
    make("ab")
    lease = one.claim(2)
    one.commit()
    one.ack(lease.lease_id, 0)
    second = two.blocked(two.extend, lease.lease_id, 60, offset=0)
    one.commit()
    assert second.result(10) is None
    two.commit()
    outcome = two.ack(lease.lease_id, 0, 1)
    assert (outcome.settled, outcome.lost, outcome.already) == (2, [], [0])


@pytest.mark.req("G7")
def test_extension_in_time_keeps_the_lease_from_the_fold(make: Make, one: Session, two: Session, clock: Clock) -> None:
    make("ab")
    lease = one.claim(2)
    one.commit()
    clock.move(29)
    assert one.extend(lease.lease_id, 30) is not None
    clock.move(10)
    assert two.claim(9).reason == "empty"  # not committed, and locked: counts as live
    two.commit()
    one.commit()
    assert two.claim(9).reason == "empty"
    two.commit()
    assert one.ack_lease(lease.lease_id).settled == 2


@pytest.mark.req("G7", "K2")
def test_extending_one_message_extends_its_key_with_it(make: Make, one: Session, two: Session, clock: Clock) -> None:
    """Else K@2 could be settled when K@0 is lost, and K@0 would be delivered again after it."""
    make("KaK")
    lease = one.claim(3)
    assert one.extend(lease.lease_id, 60, offset=2) is not None
    one.commit()
    clock.move(31)
    assert two.claim(9).attempts == {1: 2}
    two.commit()
    assert one.ack(lease.lease_id, 0, 1, 2).lost == [1]


@pytest.mark.req("G7", "K2")
def test_shortening_one_message_shortens_its_key_with_it(make: Make, one: Session, two: Session, clock: Clock) -> None:
    make("KaK")
    lease = one.claim(3)
    assert one.extend(lease.lease_id, 1, offset=0) is not None
    one.commit()
    clock.move(2)
    assert one.ack(lease.lease_id, 2).lost == [2]
    assert one.ack(lease.lease_id, 1).lost == []
    one.commit()
    again = two.claim(9)
    assert again.attempts == {0: 2}
    two.ack_lease(again.lease_id)
    assert two.claim(9).attempts == {2: 2}


@pytest.mark.req("G14")
def test_extension_behind_a_fold_is_lost(make: Make, one: Session, two: Session, clock: Clock) -> None:
    make("ab")
    lease = one.claim(2)
    one.commit()
    clock.move(31)
    assert two.claim(9).attempts == {0: 2}  # folded, not committed
    clock.move(-2)  # a client whose clock says that it is in time
    extending = one.blocked(one.extend, lease.lease_id, 30)
    two.commit()
    assert extending.result(10) is None


@pytest.mark.req("G14")
def test_ack_behind_a_fold_is_lost(make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock) -> None:
    make("ab")
    lease = one.claim(2)
    one.commit()
    clock.move(31)
    two.claim(9)
    clock.move(-2)
    acking = one.blocked(one.ack, lease.lease_id, 0, 1)
    two.commit()
    assert acking.result(10).lost == [0, 1]
    one.commit()
    assert c.stats(TOPIC, GROUP).depth == 2


@pytest.mark.req("G14")
def test_a_whole_ack_that_waited_past_its_deadline_is_lost(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    """Whoever had the row has changed nothing, so nothing makes PostgreSQL look at the deadline again."""
    make("ab")
    lease = one.call("claim", topic=TOPIC, group=GROUP, max=2, visibility=timedelta(seconds=1))[0][0]
    one.commit()
    one.call("lock_lease", lease_id=lease["lease_id"])
    acking = two.blocked(two.ack_lease, UUID(lease["lease_id"]), by_its_clock=True)
    wait_for(
        lambda: one.connection.execute("SELECT clock_timestamp() > %s", [lease["deadline"]]).fetchone() == (True,),
        "the deadline does not pass",
    )
    one.rollback()
    outcome = acking.result(10)
    assert (outcome.settled, outcome.lost) == (0, [0, 1])
    two.commit()
    assert two.connection.execute("SELECT count(*) FROM custody.journal WHERE kind = 'ack'").fetchone() == (0,)
    assert two.call("claim", topic=TOPIC, group=GROUP, max=2)[1][1] == 0


@pytest.mark.req("X1")
def test_a_whole_ack_behind_a_rewind_names_what_it_lost(make: Make, one: Session, two: Session) -> None:
    make("abcd")
    lease = one.claim(4)
    one.commit()
    two.rewind(2)
    acking = one.blocked(one.ack_lease, lease.lease_id)
    two.commit()
    outcome = acking.result(10)
    assert (outcome.settled, outcome.lost) == (2, [2, 3])
    one.commit()
    assert two.claim(9).attempts == {2: 1, 3: 1}


@pytest.mark.req("X1")
@pytest.mark.parametrize("named", [True, False])
def test_an_exact_settle_behind_a_rewind_changes_nothing(
    make: Make, c: custody.Custody, one: Session, two: Session, named: bool
) -> None:
    make("abcd")
    lease = one.claim(4)
    one.commit()
    two.rewind(2)
    if named:
        acking = one.blocked(one.settle, lease.lease_id, dict.fromkeys(range(4), "ack"), exact=True)
    else:
        acking = one.blocked(one.ack_lease, lease.lease_id, exact=True)
    two.commit()
    with pytest.raises(psycopg.Error) as refused:
        acking.result(10)
    assert (refused.value.diag.message_detail, refused.value.diag.column_name) == ("lease_lost", "2,3")
    one.rollback()
    assert c.stats(TOPIC, GROUP).in_flight == 2
