"""Expiry is a rule: exact at the deadline, decided when state is read, charged to a message only if it was alone."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, offsets, start

from custody import Constant, Custody, Policy
from custody.errors import LeaseLost

pytestmark = pytest.mark.core


@pytest.mark.req("V5", "C2")
def test_a_lease_expires_exactly_at_its_deadline(c: Custody, clock: Clock) -> None:
    start(c, 1)
    lease = c.claim(TOPIC, GROUP)
    clock.move(29.999999)
    assert not c.claim(TOPIC, GROUP)
    clock.move(0.000001)
    assert clock.time == lease.deadline
    assert offsets(c.claim(TOPIC, GROUP)) == [0]


@pytest.mark.req("C2")
def test_expiry_is_seen_by_every_reader_before_anybody_acts_on_it(
    c: Custody, clock: Clock, db: psycopg.Connection
) -> None:
    start(c, 5)
    lease = c.claim(TOPIC, GROUP, max_messages=5)
    before = everything(db)
    assert (c.stats(TOPIC, GROUP).in_flight, c.stats(TOPIC, GROUP).waiting) == (5, 0)
    clock.move(30)
    assert (c.stats(TOPIC, GROUP).in_flight, c.stats(TOPIC, GROUP).waiting) == (0, 5)
    with pytest.raises(LeaseLost):
        lease.ack()
    assert everything(db) == before, "reading it changed nothing"


@pytest.mark.req("V5", "C3")
def test_a_killed_workers_messages_come_back_with_attempt_two(c: Custody, clock: Clock) -> None:
    start(c, 100)
    late = c.claim(TOPIC, GROUP, max_messages=100)
    clock.move(30)
    again = drain(c)
    assert offsets(again) == list(range(100))
    assert {m.attempt for m in again} == {2}
    with pytest.raises(LeaseLost):
        late.ack()
    assert c.stats(TOPIC, GROUP).depth == 0


@pytest.mark.req("C4")
def test_expired_messages_come_back_in_leases_a_tenth_the_size(c: Custody, clock: Clock) -> None:
    start(c, 1000)
    for attempt, size in enumerate([1000, 100, 10, 1], start=1):
        lease = c.claim(TOPIC, GROUP, max_messages=5000)
        assert (len(lease), lease.messages[0].offset, lease.messages[0].attempt) == (size, 0, attempt)
        clock.move(30)


@pytest.mark.req("C4")
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_the_message_that_kills_its_worker_ends_up_alone_and_only_it_dies(
    c: Custody, clock: Clock, ordering: str
) -> None:
    poison = 617
    policy = Policy.from_mapping({"ordering": ordering, "max_attempts": 3})
    start(c, policy=policy, keys=[f"k{n % 50}" for n in range(1000)])
    done: set[int] = set()
    kills = 0
    while c.stats(TOPIC, GROUP).depth:
        lease = c.claim(TOPIC, GROUP, max_messages=1000)
        if poison in offsets(lease):
            kills += 1
            clock.move(30)
        elif lease:
            done.update(offsets(lease))
            lease.ack()
        else:
            clock.move(1)
        assert kills < 10
    assert done == set(range(1000)) - {poison}
    (letter,) = c.dead(TOPIC, GROUP)
    assert (letter.offset, letter.reason, letter.last_error) == (poison, "lease_expired", "lease expired")
    assert kills == 6, "1000, 100, 10 and then three times alone"
    assert letter.attempts == 6


@pytest.mark.req("C4")
def test_nobody_is_charged_when_a_lease_of_several_expires(c: Custody, clock: Clock) -> None:
    start(c, 2, Policy(max_attempts=1))
    c.claim(TOPIC, GROUP, max_messages=2)
    clock.move(30)
    assert [(m.offset, m.attempt) for m in drain(c)] == [(0, 2), (1, 2)]
    assert c.dead(TOPIC, GROUP) == []


@pytest.mark.req("C4")
def test_a_message_leased_alone_is_charged_and_dies_at_the_limit(c: Custody, clock: Clock) -> None:
    start(c, 1, Policy(max_attempts=2))
    for attempt in (1, 2):
        assert c.claim(TOPIC, GROUP).messages[0].attempt == attempt
        clock.move(30)
    assert not c.claim(TOPIC, GROUP)
    (letter,) = c.dead(TOPIC, GROUP)
    assert (letter.attempts, letter.reason, letter.died_at) == (2, "lease_expired", clock.time)


@pytest.mark.req("C4")
def test_the_last_one_left_of_a_lease_was_not_alone(c: Custody, clock: Clock) -> None:
    start(c, 2, Policy(max_attempts=1))
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    lease.ack(lease.messages[0])
    clock.move(30)
    assert offsets(drain(c)) == [1]


@pytest.mark.req("C4")
def test_expired_retries_shrink_too_and_keep_their_failures(c: Custody, clock: Clock) -> None:
    start(c, 40, Policy(max_attempts=3, backoff=Constant("1s")))
    c.claim(TOPIC, GROUP, max_messages=40).nack(error="first")
    clock.move(1)
    assert len(c.claim(TOPIC, GROUP, max_messages=40)) == 40
    clock.move(30)
    lease = c.claim(TOPIC, GROUP, max_messages=40)
    assert (len(lease), {m.attempt for m in lease}) == (4, {3})
    assert {m.headers["x-custody-last-error"] for m in lease} == {"first"}
    assert lease.nack(error="second").dead == ()
    clock.move(1)
    while lease := c.claim(TOPIC, GROUP, max_messages=40):
        lease.ack()
    assert c.stats(TOPIC, GROUP).depth == 0
    assert c.dead(TOPIC, GROUP) == []


@pytest.mark.req("C2")
def test_one_claim_folds_many_expired_leases(c: Custody, clock: Clock) -> None:
    start(c, 30)
    for _ in range(10):
        c.claim(TOPIC, GROUP, max_messages=3)
    clock.move(30)
    again = drain(c)
    assert sorted(offsets(again)) == list(range(30))
    assert {m.attempt for m in again} == {2}


@pytest.mark.req("C2", "C4")
def test_an_expired_lease_returns_only_what_was_left_of_it(c: Custody, clock: Clock) -> None:
    start(c, 100)
    lease = c.claim(TOPIC, GROUP, max_messages=100)
    lease.ack(lease.messages[::2])
    clock.move(30)
    assert offsets(drain(c)) == list(range(1, 100, 2))


@pytest.mark.req("C2")
def test_a_longer_lease_outlives_a_shorter_one(c: Custody, clock: Clock) -> None:
    start(c, 2)
    short = c.claim(TOPIC, GROUP, visibility_timeout="5s")
    long = c.claim(TOPIC, GROUP, visibility_timeout="1h")
    clock.move(5)
    assert offsets(c.claim(TOPIC, GROUP, max_messages=9)) == offsets(short)
    clock.move(timedelta(minutes=59).total_seconds())
    assert long.ack().settled == 1


@pytest.mark.req("V3")
def test_the_journal_records_who_lost_what(c: Custody, clock: Clock) -> None:
    start(c, 2)
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    clock.move(30)
    c.claim(TOPIC, GROUP)
    expired = c.trace(TOPIC, 0, 0)[1]
    assert (expired.kind, expired.worker, expired.lease_id) == ("expire", "test", lease.lease_id)
    assert (expired.error, expired.at, expired.attempt) == ("lease expired", clock.time, 1)
