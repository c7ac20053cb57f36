"""A key that has failed comes back with few messages, so that little is parked again if it fails once more."""

from __future__ import annotations

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, offsets, start
from tests.order_rule import audit

from custody import Constant, Custody, Lease, Outcome, Policy
from custody.model.lifecycle import MessageState

pytestmark = [pytest.mark.core, pytest.mark.req("K1", "N1")]

BY_KEY = Policy(ordering="key", max_attempts=5, backoff=Constant("10s"))
MANY = 60


def fail_first(c: Custody, policy: Policy = BY_KEY) -> None:
    """One key with 60 messages, of which the first has failed."""
    start(c, policy=policy, keys="a" * MANY)
    lease = c.claim(TOPIC, GROUP, max_messages=MANY)
    assert len(lease) == MANY
    lease.nack(lease.messages[0])


def claim(c: Custody) -> Lease:
    return c.claim(TOPIC, GROUP, max_messages=100)


def leases(c: Custody) -> list[int]:
    """How many messages each claim gives until there are none, if none fails."""
    found = []
    while lease := claim(c):
        found.append(len(lease))
        lease.ack()
    return found


def attempts(c: Custody, clock: Clock, count: int) -> None:
    """Fails the message that blocks the key so often again, then makes it done."""
    for _ in range(count):
        clock.move(10)
        lease = claim(c)
        assert offsets(lease) == [0]
        lease.nack()
    clock.move(10)
    lease = claim(c)
    assert offsets(lease) == [0]
    lease.ack()


def test_a_key_whose_message_failed_once_comes_back_with_four_messages_then_eight(c: Custody, clock: Clock) -> None:
    fail_first(c)
    attempts(c, clock, 0)
    assert leases(c) == [4, 8, 16, 31]


def test_a_key_whose_message_failed_again_comes_back_with_one_message_then_two(c: Custody, clock: Clock) -> None:
    fail_first(c)
    attempts(c, clock, 1)
    assert leases(c) == [1, 2, 4, 8, 16, 28]


def test_a_key_that_fails_while_it_comes_back_begins_again(c: Custody, clock: Clock) -> None:
    fail_first(c)
    attempts(c, clock, 0)
    claim(c).ack()
    lease = claim(c)
    assert len(lease) == 8
    assert lease.nack(lease.messages[0]).released == tuple(range(6, 13)), "no more than came back"
    clock.move(10)
    assert leases(c) == [1, 4, 8, 16, 26]


def test_a_lease_settled_in_pieces_does_not_bring_the_key_back_early(c: Custody, clock: Clock) -> None:
    fail_first(c)
    attempts(c, clock, 0)
    lease = claim(c)
    for message in lease:
        assert not claim(c)
        lease.ack(message)
    assert len(claim(c)) == 8


def test_other_keys_come_in_full_meanwhile(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="ab" * 30)
    lease = c.claim(TOPIC, GROUP, max_messages=40)
    lease.nack(lease.messages[0])
    lease.ack()
    clock.move(10)
    assert offsets(drain(c))[:12] == [0, *range(41, 60, 2), 2], "its retry with what is fresh of the other key"


def test_a_released_key_comes_back_in_full(c: Custody, clock: Clock) -> None:
    fail_first(c, Policy(ordering="key", max_attempts=2, backoff=Constant("10s"), on_dead="hold"))
    clock.move(10)
    claim(c).nack()
    assert not claim(c)
    assert c.release_key(TOPIC, GROUP, "a") == 1
    assert leases(c) == [MANY - 1]


def test_an_operator_who_skips_a_message_lifts_the_slow_start(c: Custody, clock: Clock) -> None:
    fail_first(c)
    attempts(c, clock, 0)
    lease = claim(c)
    assert len(lease) == 4
    lease.nack(lease.messages[0])
    c.skip(TOPIC, GROUP, 0, 1)
    assert leases(c) == [MANY - 2]


def test_a_dead_message_that_lets_its_key_go_on_is_a_failure_too(c: Custody, clock: Clock) -> None:
    fail_first(c, Policy(ordering="key", max_attempts=2, backoff=Constant("10s")))
    clock.move(10)
    claim(c).nack()
    assert leases(c)[:3] == [1, 2, 4]


@pytest.mark.parametrize("fairness", [None, "key", "tenant"])
def test_a_key_that_always_fails_is_parked_once(
    c: Custody, db: psycopg.Connection, clock: Clock, fairness: str | None
) -> None:
    """Each of its messages fails twice; the other key never does."""
    policy = Policy(ordering="key", max_attempts=9, backoff=Constant("0s"), fairness=fairness)
    start(c, policy=policy, keys="ab" * 50)
    while lease := claim(c):
        failed = next((m for m in lease if m.key == "a" and m.attempt <= 2), None)
        c.settle(
            lease.lease_id,
            {m.offset: Outcome("ack") for m in lease if m.key == "b" or failed is None or m.offset < failed.offset}
            | ({} if failed is None else {failed.offset: Outcome("nack")}),
        )
    verdict = audit(db, TOPIC, GROUP)
    assert verdict.violations == []
    assert verdict.count(MessageState.DONE) == 100
    parked = db.execute(
        "SELECT coalesce(sum(custody.cardinality(offsets)), 0) FROM custody.journal WHERE kind = 'park'"
    ).fetchone()
    assert parked is not None
    assert parked[0] <= 100, "once when it was read, and not again with each failure"


def test_messages_with_cases_of_their_own_come_back_slowly_too(c: Custody, clock: Clock) -> None:
    """Each of them has failed, so each is a case."""
    start(c, policy=BY_KEY, keys="a" * 40)
    claim(c).nack()
    clock.move(10)
    assert leases(c) == [4, 8, 16, 12]


def test_retries_without_a_key_come_back_together(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys=[None] * 4 + ["a"])
    claim(c).nack()
    clock.move(10)
    assert offsets(claim(c)) == [0, 1, 2, 3, 4]


def test_a_key_goes_on_when_the_message_that_it_waits_behind_is_done_though_its_lease_is_not(c: Custody) -> None:
    start(c, policy=BY_KEY, keys="abab")
    first = c.claim(TOPIC, GROUP, max_messages=2)
    assert not claim(c)
    assert not claim(c)
    first.ack(first.messages[0])
    assert offsets(claim(c)) == [2]
    first.ack()
    assert offsets(claim(c)) == [3]


def test_a_key_waits_behind_the_message_that_was_handed_out_again(c: Custody, clock: Clock) -> None:
    """After a rewind another message of the key is in flight than the one that it waited behind."""
    start(c, policy=BY_KEY, keys="aaa")
    c.claim(TOPIC, GROUP, max_messages=2)
    assert not claim(c), "the third message is parked behind the second"
    c.rewind(TOPIC, GROUP, to_offset=0)
    again = c.claim(TOPIC, GROUP)
    assert offsets(again) == [0]
    assert not claim(c)
    again.ack()
    assert offsets(drain(c)) == [1, 2]
