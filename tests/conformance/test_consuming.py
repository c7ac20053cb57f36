"""Claim and settle, by either way."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from tests.conformance.conftest import Fill, refused
from tests.conftest import Clock

import custody
from custody import Outcome
from custody.errors import LeaseLost
from custody.model.entities import Settled
from custody.model.outcomes import OUTCOMES, Kind

pytestmark = pytest.mark.core


def test_a_claim_leases_messages_until_a_deadline(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(5)
    lease = orders.claim("orders", "stock", max_messages=3, visibility_timeout="45s")
    assert [(message.offset, message.attempt, message.key) for message in lease] == [
        (0, 1, "k0"),
        (1, 1, "k1"),
        (2, 1, "k2"),
    ]
    assert lease.deadline == clock() + timedelta(seconds=45)
    assert orders.in_flight("orders") == {0: (3, 0.0)}
    assert orders.in_flight("orders", "stock") == {0: (3, 0.0)}


def test_an_empty_lease_says_why(orders: custody.Custody) -> None:
    lease = orders.claim("orders", "stock")
    assert (bool(lease), len(lease), lease.reason, lease.detail) == (False, 0, "empty", None)
    with refused("lease_lost"):
        lease.ack()


def test_a_cap_is_a_reason_too(c: custody.Custody, fill: Fill) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", custody.Policy(max_in_flight=2))
    fill(5)
    assert len(c.claim("orders", "g", max_messages=5)) == 2
    assert c.claim("orders", "g").reason == "max_in_flight"


def test_a_claim_may_name_its_partition(c: custody.Custody) -> None:
    c.create_topic("orders", partitions=3)
    c.create_group("orders", "g")
    c.publish("orders", 1, partition=2)
    assert c.claim("orders", "g", partition=1).reason == "empty"
    assert [message.partition for message in c.claim("orders", "g", partition=2)] == [2]
    for partition in (3, -1):
        with refused("partition_not_found"):
            c.claim("orders", "g", partition=partition)


def test_claims_that_make_no_sense_are_refused(orders: custody.Custody) -> None:
    for wrong in ({"max_messages": 0}, {"visibility_timeout": "0s"}, {"visibility_timeout": "soon"}):
        with refused("invalid_argument"):
            orders.claim("orders", "stock", **wrong)  # type: ignore[arg-type]


def test_messages_are_acknowledged_one_by_one_or_all(orders: custody.Custody, fill: Fill) -> None:
    fill(5)
    lease = orders.claim("orders", "stock", max_messages=5)
    assert lease.ack(lease.messages[0]).settled == 1
    assert lease.ack(lease.messages[1:3]).settled == 2
    assert lease.ack([]).settled == 0
    assert lease.ack().settled == 2
    assert orders.stats("orders", "stock").depth == 0


@pytest.mark.req("V3", "G14")
@pytest.mark.parametrize("kind", OUTCOMES)
def test_every_outcome_can_be_given_to_all_of_a_lease(orders: custody.Custody, fill: Fill, kind: Kind) -> None:
    fill(2)
    lease = orders.claim("orders", "stock", max_messages=2)
    outcome = Outcome(kind, delay="1m" if kind in ("nack", "later") else None)
    assert orders.settle(lease.lease_id, outcome).settled == 2
    assert orders.settle(lease.lease_id, outcome).already, "a repeat is no loss"
    assert orders.trace("orders", 0, 0)[-1].kind == OUTCOMES[kind].entry
    stats = orders.stats("orders", "stock")
    assert (stats.depth == 0) == (OUTCOMES[kind].resolves != "no")
    assert stats.dead == (2 if OUTCOMES[kind].counted == "dead" else 0)


def test_what_is_not_held_is_lost_and_the_rest_is_settled(orders: custody.Custody, fill: Fill) -> None:
    fill(3)
    lease = orders.claim("orders", "stock", max_messages=3)
    lease.nack(lease.messages[0])
    with pytest.raises(LeaseLost) as lost:
        orders.ack(lease.lease_id, [0, 1])
    assert lost.value.lost == (0,)
    assert orders.stats("orders", "stock").in_flight == 1
    with pytest.raises(LeaseLost) as lost:
        orders.ack(uuid4(), [7])
    assert lost.value.lost == (7,)
    with pytest.raises(LeaseLost) as lost:
        orders.ack(uuid4())
    assert lost.value.lost == ()


@pytest.mark.req("G14")
def test_a_settle_after_the_deadline_is_lost(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(2)
    lease = orders.claim("orders", "stock", max_messages=2, visibility_timeout="10s")
    clock.move(10)
    for settle in (
        lease.ack,
        lease.nack,
        lease.release,
        lambda: lease.later(after="1s"),
        lambda: lease.ack(lease.messages[0]),
        lambda: lease.nack(lease.messages[0]),
        lambda: lease.release(lease.messages[0]),
        lambda: lease.later(lease.messages[0], after="1s"),
        lambda: lease.extend("1m"),
        lambda: lease.extend("1m", message=lease.messages[0]),
        lambda: orders.settle(lease.lease_id, {0: Outcome("ack"), 1: Outcome("nack")}),
    ):
        with refused("lease_lost"):
            settle()
    again = orders.claim("orders", "stock", max_messages=2)
    assert [message.attempt for message in again][:1] == [2]


def test_a_failed_message_comes_again_and_dies(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(1)
    lease = orders.claim("orders", "stock")
    assert lease.nack(error="no answer").dead == ()
    assert orders.claim("orders", "stock").reason == "empty"
    assert orders.next_due("orders", "stock") == pytest.approx(10)
    clock.move(10)
    second = orders.claim("orders", "stock")
    (message,) = second
    assert (message.attempt, message.headers["x-custody-last-error"]) == (2, "no answer")
    assert second.nack(error="again no answer").dead == (0,)
    (letter,) = orders.dead("orders", "stock")
    assert (letter.attempts, letter.reason, letter.last_error) == (2, "max_retries_exceeded", "again no answer")
    assert letter.errors == ("attempt 1: no answer", "attempt 2: again no answer")
    assert (letter.payload, letter.key, letter.died_at, letter.held) == ({"n": 0}, "k0", clock(), False)


def test_a_failed_message_may_wait_its_own_time(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(1)
    orders.claim("orders", "stock").nack(delay="3s")
    assert orders.next_due("orders", "stock") == pytest.approx(3)
    clock.move(3)
    assert orders.claim("orders", "stock").nack(requeue=False, error="hopeless").dead == (0,)
    with refused("invalid_argument"):
        orders.nack(uuid4(), [1], delay="soon")


def test_a_released_message_was_never_delivered(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(2)
    lease = orders.claim("orders", "stock", max_messages=2)
    assert lease.release(lease.messages[0]).settled == 1
    assert lease.later(after="1m").settled == 1
    again = orders.claim("orders", "stock", max_messages=2)
    assert [(m.offset, m.attempt) for m in again] == [(0, 1)]
    again.ack()
    clock.move(60)
    assert [(m.offset, m.attempt) for m in orders.claim("orders", "stock")] == [(1, 1)]


def test_many_outcomes_are_settled_at_once(c: custody.Custody, fill: Fill) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    fill(6)
    lease = c.claim("orders", "g", max_messages=6)
    kinds = ("ack", "nack", "dead", "reject", "later", "release")
    outcomes = {n: Outcome(kind, error="\0why\ud800", delay="1m") for n, kind in enumerate(kinds)}  # type: ignore[arg-type]
    settled = c.settle(lease.lease_id, outcomes)
    assert (settled.settled, settled.dead) == (6, (2, 3))
    assert c.settle(lease.lease_id, {}).settled == 0
    stats = c.stats("orders", "g")
    assert (stats.dead, stats.waiting, stats.in_flight) == (2, 3, 0)


def test_order_holds_within_a_lease(orders: custody.Custody, fill: Fill) -> None:
    fill(4, keys=1)
    lease = orders.claim("orders", "stock", max_messages=4)
    with refused("order_conflict"):
        lease.ack(lease.messages[2])
    stopped = orders.settle(lease.lease_id, {0: Outcome("ack"), 1: Outcome("nack", error="x")})
    assert (stopped.settled, stopped.released) == (2, (2, 3))
    (blocked,) = orders.blocked_keys("orders", "stock")
    assert (blocked.key, blocked.blocked_by, blocked.why, blocked.last_error) == ("k0", 1, "backoff", "x")


def test_a_lease_is_extended(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(3)
    lease = orders.claim("orders", "stock", max_messages=3, visibility_timeout="10s")
    assert lease.extend("1m") == clock() + timedelta(seconds=60) == lease.deadline
    assert lease.extend("2m", message=lease.messages[1]) == clock() + timedelta(seconds=120)
    assert orders.extend(lease.lease_id) == clock() + timedelta(seconds=30)
    with pytest.raises(LeaseLost) as lost:
        orders.extend(lease.lease_id, offset=99)
    assert lost.value.lost == (99,)
    with refused("invalid_argument"):
        lease.extend("soon")


@pytest.mark.req("C8")
def test_stats_are_the_same_figures(orders: custody.Custody, direct: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(9)
    lease = orders.claim("orders", "stock", max_messages=6)
    lease.ack(lease.messages[2:3])
    lease.nack(lease.messages[0], error="x")
    clock.move(1)
    stats = orders.stats("orders", "stock")
    assert (stats.lag, stats.tail, stats.paused_at, stats.breaker) == (3, (9,), None, None)
    assert (stats.in_flight, stats.waiting + stats.parked, stats.depth) == (3, 2, 8)
    assert stats == direct.stats("orders", "stock")
    assert orders.blocked_keys("orders", "stock") == direct.blocked_keys("orders", "stock")


def test_history_tells_who_did_what(orders: custody.Custody, direct: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(1)
    lease = orders.claim("orders", "stock")
    lease.nack(error="bad")
    clock.move(10)
    orders.claim("orders", "stock").ack()
    history = orders.trace("orders", 0, 0)
    assert [(entry.kind, entry.attempt, entry.worker, entry.error) for entry in history] == [
        ("claim", 1, "test", None),
        ("nack", 1, "test", "bad"),
        ("claim", 2, "test", None),
        ("ack", 2, "test", None),
    ]
    assert history[0].lease_id == lease.lease_id
    assert history == direct.trace("orders", 0, 0)
    assert orders.trace("orders", 0, 0, group="other") == []
    assert orders.trace("orders", 7, 0) == orders.trace("orders", -1, 0) == []


def test_handling_times_are_known(orders: custody.Custody, direct: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(1)
    lease = orders.claim("orders", "stock")
    clock.move(2)
    lease.ack()
    assert orders.handling_times("orders") == direct.handling_times("orders", "stock")
    assert [one.slowest for one in orders.handling_times()] == [2.0]


def test_the_breaker_lets_one_through(c: custody.Custody, fill: Fill, clock: Clock) -> None:
    c.create_topic("orders")
    breaker = custody.Breaker(failure_rate=0.5, min_outcomes=2, probe_after="5s")
    c.create_group("orders", "g", custody.Policy(breaker=breaker, backoff=custody.Constant("0s")))
    fill(6)
    c.claim("orders", "g", max_messages=3).nack(error="down")
    assert c.stats("orders", "g").breaker == "open"
    refusal = c.claim("orders", "g", max_messages=3)
    assert refusal.reason == "breaker_open"
    clock.move(5)
    assert len(c.claim("orders", "g", max_messages=3)) == 1
    assert c.resume("orders", "g") is True


def test_the_beginning_of_a_long_error_is_kept(orders: custody.Custody, fill: Fill) -> None:
    fill(3)
    lease = orders.claim("orders", "stock", max_messages=3)
    lease.nack(lease.messages[0], error="x" * 8_001)
    different = {1: Outcome("nack", error="y" * 1_000_000), 2: Outcome("dead", error="é\0" * 1_000_000)}
    orders.settle(lease.lease_id, different)
    assert [letter.last_error for letter in orders.dead("orders", "stock")] == ["é\ufffd" * 4_000]
    told = [orders.trace("orders", 0, offset)[-1].error for offset in range(3)]
    assert [(error or "")[:2] + str(len(error or "")) for error in told] == ["xx8000", "yy8000", "é\ufffd8000"]


@pytest.mark.req("X1")
@pytest.mark.parametrize("verb", ["ack", "nack", "release", "later", "extend"])
def test_a_verb_for_the_whole_lease_names_what_was_lost(orders: custody.Custody, fill: Fill, verb: str) -> None:
    fill(4)
    lease = orders.claim("orders", "stock", max_messages=4)
    lease.ack(lease.messages[0])
    orders.rewind("orders", "stock", to_offset=2)
    with pytest.raises(LeaseLost) as lost:
        getattr(lease, verb)(**({"after": "1m"} if verb == "later" else {}))
    assert lost.value.lost == (2, 3)
    assert orders.stats("orders", "stock").in_flight == (1 if verb == "extend" else 0)
    assert orders.trace("orders", 0, 1)[-1].kind == verb


@pytest.mark.req("X1")
def test_a_transaction_takes_a_whole_lease_or_nothing(orders: custody.Custody, fill: Fill) -> None:
    fill(4)
    lease = orders.claim("orders", "stock", max_messages=4)
    orders.rewind("orders", "stock", to_offset=2)
    transaction = orders.init_producer("p").transaction()
    with pytest.raises(LeaseLost) as lost:
        transaction.ack(lease)
    assert lost.value.lost == (2, 3)
    transaction.ack(lease, lease.messages)  # named ones are looked at by the commit
    with pytest.raises(LeaseLost) as lost:
        transaction.commit()
    assert lost.value.lost == (2, 3)
    assert orders.stats("orders", "stock").in_flight == 2


@pytest.mark.req("G5", "G14")
def test_a_repeated_settle_is_a_success_and_a_lost_one_is_not(orders: custody.Custody, fill: Fill) -> None:
    fill(4)
    lease = orders.claim("orders", "stock", max_messages=4)
    first, second, *rest = lease.messages
    assert lease.ack(first) == Settled(settled=1)
    assert lease.ack(first) == Settled(settled=1, already=True)
    assert lease.ack(first, second) == Settled(settled=2, already=True)
    assert lease.nack(rest, requeue=False) == Settled(settled=2, dead=(2, 3))
    assert lease.nack(rest, requeue=False) == Settled(settled=2, dead=(2, 3), already=True)
    with refused("lease_lost"):
        lease.ack(rest)
    with refused("lease_lost"):
        lease.release()


def test_the_next_claim_can_ack_a_lease(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(5, keys=5)
    lease = orders.claim("orders", "stock", max_messages=2, visibility_timeout="45s")
    lease.nack(lease.messages[0], delay="1h")
    following = lease.next()
    assert following.settled == Settled(settled=1)
    assert following.lost is None
    assert ([message.offset for message in following], following.deadline) == ([2, 3], clock() + timedelta(seconds=45))
    last = orders.claim("orders", "stock", settle=following.lease_id)
    assert (last.settled, [message.offset for message in last]) == (Settled(settled=2), [4])
    assert orders.in_flight("orders") == {0: (1, 0.0)}
    nothing = last.next()
    assert (nothing.settled, nothing.reason) == (Settled(settled=1), "empty")
    orders.publish("orders", 6, key="another")
    assert [message.offset for message in nothing.next()] == [5]
    assert orders.stats("orders", "stock").waiting == 1


def test_a_next_claim_has_nothing_to_ack_after_a_settle(orders: custody.Custody, fill: Fill) -> None:
    fill(6, keys=6)
    for settle in (
        lambda lease: lease.nack(delay="1h"),
        lambda lease: [lease.nack(message, delay="1h") for message in lease],
        lambda lease: lease.ack(lease.messages),
    ):
        lease = orders.claim("orders", "stock")
        settle(lease)
        following = lease.next()
        assert (following.settled, following.lost, len(following)) == (None, None, 1)
        following.release()


def test_a_next_claim_reports_a_lost_lease_beside_the_new_one(
    orders: custody.Custody, fill: Fill, clock: Clock
) -> None:
    fill(2)
    lease = orders.claim("orders", "stock", visibility_timeout="30s")
    clock.move(31)
    following = lease.next()
    assert following.lost is not None
    assert (following.lost.code, list(following.lost.lost)) == ("lease_lost", [0])
    assert len(following) == 1
    assert following.ack() == Settled(settled=1)
    again = orders.claim("orders", "stock", settle=following.lease_id)
    assert (again.settled, again.lost) == (Settled(settled=1, already=True), None)
    again.ack()
    orders.publish("orders", 3)
    unknown = orders.claim("orders", "stock", settle=uuid4())
    assert unknown.lost is not None
    assert unknown.lost.lost == ()
    assert len(unknown) == 1


def test_a_paused_group_acks_and_hands_out_nothing(orders: custody.Custody, fill: Fill) -> None:
    fill(2)
    lease = orders.claim("orders", "stock")
    orders.pause("orders", "stock", reason="a bad deploy")
    following = lease.next()
    assert (following.settled, following.reason, following.detail) == (Settled(settled=1), "paused", "a bad deploy")


def test_a_claim_settles_a_lease_or_its_id(orders: custody.Custody, fill: Fill) -> None:
    fill(1)
    with refused("invalid_argument"):
        orders.claim("orders", "stock", settle="x")  # type: ignore[arg-type]
    with refused("lease_lost"):
        orders.claim("orders", "stock", settle=orders.claim("orders", "stock", max_messages=1, partition=0).next())


@pytest.mark.req("G5", "G14", "K2")
def test_the_next_claim_can_settle_each_message_as_it_came_out(orders: custody.Custody, fill: Fill) -> None:
    fill(8, keys=2)
    lease = orders.claim("orders", "stock", max_messages=5)
    assert [message.key for message in lease] == ["k0", "k1", "k0", "k1", "k0"]
    following = lease.next({0: Outcome("ack"), 1: Outcome("nack", error="x", delay="1h"), 2: Outcome("ack")})
    assert following.settled == Settled(settled=3, released=(3,)), "what follows a failed message leaves its lease"
    assert following.lost is None
    assert list(following) == [], "the keys of all that follows are blocked, or still in the lease"
    assert lease.ack(lease.messages[4]).settled == 1
    rest = following.next()
    assert [message.offset for message in rest] == [6]
    done = rest.next({6: Outcome("reject", error="never")})
    assert (done.settled, done.reason) == (Settled(settled=1, dead=(6,)), "empty")
    assert orders.stats("orders", "stock").waiting == 1
    assert done.next({}).settled is None, "nothing was named"


@pytest.mark.req("G5", "G14")
def test_a_next_claim_reports_outcomes_that_were_lost(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(3, keys=3)
    lease = orders.claim("orders", "stock", visibility_timeout="30s")
    said = {0: Outcome("nack", error="x", delay="1h")}
    following = lease.next(said)
    again = orders.claim("orders", "stock", settle=lease, outcomes=said)
    assert (again.settled, again.lost) == (Settled(settled=1, already=True), None)
    assert ([message.offset for message in following], [message.offset for message in again]) == ([1], [2])
    clock.move(31)
    late = following.next({1: Outcome("ack")})
    assert late.lost is not None
    assert list(late.lost.lost) == [1]
    assert [message.offset for message in late] == [1]


def test_outcomes_of_a_claim_need_a_lease(orders: custody.Custody) -> None:
    with refused("invalid_argument"):
        orders.claim("orders", "stock", outcomes={0: Outcome("ack")})
