"""Outcomes of a lease and the next claim in one transaction: what a settle by itself would do happens all the same."""

from __future__ import annotations

import pytest
from tests.conftest import Clock

from custody import Breaker, Constant, Custody, Outcome, Outgoing, Policy
from custody.errors import InvalidArgument
from custody.model.entities import Settled

pytestmark = pytest.mark.core

FAILED = Outcome("nack", error="down", delay="1h")


@pytest.mark.req("N3")
def test_dead_messages_are_copied_once_with_those_that_the_claim_finds(c: Custody, clock: Clock) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", Policy(max_attempts=1, dead_letter="topic"))
    c.publish_many("orders", [0, 1, 2, 3])
    expiring = c.claim("orders", "g", visibility_timeout="10s")
    assert len(expiring) == 1
    lease = c.claim("orders", "g", max_messages=2, visibility_timeout="1h")
    c.publish("orders", 9, delay="5s")
    clock.move(11)
    said = {1: Outcome("nack", error="x"), 2: Outcome("ack")}
    following = lease.next(said)
    assert following.settled == Settled(settled=2, dead=(1,))
    again = c.claim("orders", "g", settle=lease, outcomes=said)
    assert again.settled == Settled(settled=2, dead=(1,), already=True)
    assert sorted(m.payload for m in c.read("orders-dlq")) == [0, 1], "one settled, one expired, each once"
    handed = [m.payload for some in (following, again) for m in some]
    while lease := c.claim("orders", "g"):
        handed += [m.payload for m in lease]
    assert sorted(handed) == [3, 9], "what was due is delivered by a later claim"


@pytest.mark.req("N3")
def test_a_paused_group_copies_the_dead(c: Custody) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", Policy(max_attempts=1, dead_letter="topic"))
    c.publish_many("orders", [0, 1])
    lease = c.claim("orders", "g")
    c.pause("orders", "g")
    following = lease.next({0: Outcome("nack", error="x")})
    assert (following.reason, following.settled) == ("paused", Settled(settled=1, dead=(0,)))
    assert [m.payload for m in c.read("orders-dlq")] == [0]


@pytest.mark.req("N2")
def test_outcomes_that_open_the_breaker_stop_the_claim(c: Custody) -> None:
    c.create_topic("orders")
    breaker = Breaker(failure_rate=0.5, min_outcomes=2, probe_after="5s")
    c.create_group("orders", "g", Policy(breaker=breaker, backoff=Constant("0s")))
    c.publish_many("orders", [0, 1, 2, 3])
    lease = c.claim("orders", "g", max_messages=2)
    following = lease.next({0: FAILED, 1: FAILED})
    assert (following.reason, following.settled) == ("breaker_open", Settled(settled=2))


@pytest.mark.req("K1", "G5")
def test_a_key_that_was_resolved_goes_on_in_the_claim_that_resolves_it(c: Custody, clock: Clock) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", Policy(ordering="key", backoff=Constant("10s")))
    c.publish_many("orders", [Outgoing(n, key="a") for n in range(3)])
    lease = c.claim("orders", "g", max_messages=3)
    following = lease.next({0: Outcome("nack", error="x")})
    assert (following.settled, list(following)) == (Settled(settled=1, released=(1, 2)), [])
    clock.move(10)
    retried = c.claim("orders", "g", max_messages=3)
    assert [m.offset for m in retried] == [0]
    freed = retried.next({0: Outcome("ack")})
    assert (freed.settled, [m.offset for m in freed]) == (Settled(settled=1), [1, 2])
    again = freed.next({1: Outcome("nack", error="x")})
    assert (again.settled, list(again)) == (Settled(settled=1, released=(2,)), [])


def test_outcomes_of_another_group_are_refused_and_nothing_is_settled(c: Custody) -> None:
    c.create_topic("orders")
    for group in ("g", "other"):
        c.create_group("orders", group)
    c.publish_many("orders", [0, 1])
    lease = c.claim("orders", "g")
    with pytest.raises(InvalidArgument, match="another group"):
        c.claim("orders", "other", settle=lease, outcomes={0: FAILED})
    assert lease.ack().settled == 1
