"""The circuit breaker: closed, open, probing, closed again; and an outage that dead-letters nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody import Breaker, Constant, Outcome, Policy

POLICY = Policy(
    max_attempts=3,
    backoff=Constant("1s"),
    breaker=Breaker(failure_rate=0.5, min_outcomes=10, window="60s", probe_after="5s"),
)


@pytest.fixture
def group(c: custody.Custody) -> str:
    c.create_topic("calls")
    c.create_group("calls", "caller", POLICY)
    c.publish_many("calls", [{"n": n} for n in range(100)])
    return "caller"


def fail(c: custody.Custody, number: int) -> None:
    lease = c.claim("calls", "caller", max_messages=number)
    c.settle(lease.lease_id, {m.offset: Outcome("nack", error="503 from downstream") for m in lease})


@pytest.mark.core
@pytest.mark.req("N3")
def test_it_opens_when_most_of_the_last_outcomes_failed(c: custody.Custody, group: str) -> None:
    c.claim("calls", group, max_messages=4).ack()
    fail(c, 3)
    assert c.stats("calls", group).breaker == "closed"  # too few outcomes to judge
    fail(c, 5)
    stats = c.stats("calls", group)
    assert stats.breaker == "open"
    assert stats.breaker_reason is not None
    assert "503 from downstream" in stats.breaker_reason
    lease = c.claim("calls", group)
    assert not lease
    assert lease.reason == "breaker_open"
    assert lease.detail == stats.breaker_reason


@pytest.mark.core
@pytest.mark.req("N3")
def test_it_stays_closed_while_few_fail(c: custody.Custody, group: str) -> None:
    c.claim("calls", group, max_messages=30).ack()
    fail(c, 9)
    assert c.stats("calls", group).breaker == "closed"


@pytest.mark.core
@pytest.mark.req("N3")
def test_a_probe_is_one_message_and_there_is_one_at_a_time(c: custody.Custody, group: str, clock: Clock) -> None:
    fail(c, 10)
    clock.move(5)
    probe = c.claim("calls", group, max_messages=50)
    assert len(probe) == 1
    assert c.stats("calls", group).breaker == "probing"
    assert c.claim("calls", group).reason == "breaker_open"


@pytest.mark.core
@pytest.mark.req("N3")
@pytest.mark.parametrize("whole", [True, False])
def test_a_probe_that_goes_well_closes_it(c: custody.Custody, group: str, clock: Clock, whole: bool) -> None:
    fail(c, 10)
    clock.move(5)
    probe = c.claim("calls", group)
    probe.ack() if whole else probe.ack(*probe.messages)
    assert c.stats("calls", group).breaker == "closed"
    assert len(c.claim("calls", group, max_messages=20)) == 20


@pytest.mark.core
@pytest.mark.req("N3")
def test_a_probe_that_fails_opens_it_again_and_charges_nobody(c: custody.Custody, group: str, clock: Clock) -> None:
    fail(c, 10)
    for _ in range(5):
        clock.move(5)
        probe = c.claim("calls", group)
        probe.nack(error="still down")
        assert c.stats("calls", group).breaker == "open"
        assert c.claim("calls", group).reason == "breaker_open"
    assert c.stats("calls", group).dead == 0


@pytest.mark.core
@pytest.mark.req("N3")
def test_a_probe_that_dies_is_followed_by_another(c: custody.Custody, group: str, clock: Clock) -> None:
    fail(c, 10)
    clock.move(5)
    assert c.claim("calls", group, visibility_timeout="10s")
    clock.move(9)
    assert c.claim("calls", group).reason == "breaker_open"
    clock.move(2)
    assert len(c.claim("calls", group)) == 1


@pytest.mark.core
@pytest.mark.req("N3")
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_probes_that_expire_charge_nobody_and_another_message_is_next(
    c: custody.Custody, clock: Clock, ordering: Literal["none", "key"]
) -> None:
    """An outage in which calls hang: no worker lives to say that its probe has failed."""
    group = "caller"
    c.create_topic("calls")
    c.create_group("calls", group, replace(POLICY, ordering=ordering))
    c.publish_many("calls", [custody.Outgoing(n, key=f"k{n % 30}") for n in range(100)])
    fail(c, 10)
    probed = []
    for _ in range(24):
        clock.move(5)
        lease = c.claim("calls", group, visibility_timeout="4s")
        assert c.stats("calls", group).breaker == "probing"
        probed.append(lease.messages[0].offset)
    assert len(set(probed)) > 5, "not the same message each time: one that ends its workers would keep the breaker open"
    assert c.stats("calls", group).dead == 0
    clock.move(5)
    c.claim("calls", group).ack()
    assert c.stats("calls", group).breaker == "closed"
    while c.stats("calls", group).depth:
        clock.move(5)
        if lease := c.claim("calls", group, max_messages=20):
            lease.ack()
    assert c.stats("calls", group).dead == 0


@pytest.mark.core
@pytest.mark.req("N3")
def test_what_was_in_flight_alone_when_it_opened_is_not_charged_when_it_expires(
    c: custody.Custody, group: str, clock: Clock, db: psycopg.Connection
) -> None:
    c.update_group("calls", group, replace(POLICY, max_attempts=1))
    c.claim("calls", group, visibility_timeout="4s")
    lease = c.claim("calls", group, max_messages=10)
    lease.nack(lease.messages)
    assert c.stats("calls", group).dead == 10
    clock.move(5)
    assert len(c.claim("calls", group)) == 1
    assert c.stats("calls", group).dead == 10
    assert db.execute("SELECT detail FROM custody.journal WHERE kind = 'expire'").fetchall() == [({"charged": False},)]


@pytest.mark.core
@pytest.mark.req("N3")
def test_an_operator_can_close_it(c: custody.Custody, group: str) -> None:
    fail(c, 10)
    assert c.resume("calls", group)
    assert c.stats("calls", group).breaker == "closed"
    assert len(c.claim("calls", group, max_messages=7)) == 7


@pytest.mark.core
@pytest.mark.req("N3")
def test_an_outage_of_a_minute_dead_letters_nothing(c: custody.Custody, group: str, clock: Clock) -> None:
    """Every call fails for a minute, then all go well. Without the breaker all hundred would be dead in seconds."""
    down_until = clock.time.timestamp() + 60
    done = 0
    while done < 100:
        lease = c.claim("calls", group, max_messages=8)
        if lease:
            up = clock.time.timestamp() >= down_until
            outcome = Outcome("ack") if up else Outcome("nack", error="503")
            c.settle(lease.lease_id, dict.fromkeys((m.offset for m in lease), outcome))
            done += len(lease) if up else 0
        clock.move(0.2)
        assert clock.time.timestamp() < down_until + 120, c.stats("calls", group)
    assert c.stats("calls", group).dead == 0


@pytest.mark.core
@pytest.mark.req("N3")
@pytest.mark.parametrize("probing", [False, True])
def test_switching_it_off_closes_it(c: custody.Custody, group: str, clock: Clock, probing: bool) -> None:
    fail(c, 10)
    if probing:
        clock.move(5)
        probe = c.claim("calls", group)
    c.update_group("calls", group, replace(POLICY, breaker=None))
    stats = c.stats("calls", group)
    assert (stats.breaker, stats.breaker_reason) == (None, None)
    assert len(c.claim("calls", group, max_messages=20)) == 20
    if probing:
        probe.nack()
        assert c.stats("calls", group).breaker is None


@pytest.mark.core
def test_a_breaker_that_is_open_is_always_shown(c: custody.Custody, group: str, db: psycopg.Connection) -> None:
    fail(c, 10)
    db.execute("UPDATE custody.groups SET breaker_rate = NULL")
    stats = c.stats("calls", group)
    assert stats.breaker == "open"
    assert stats.breaker_reason is not None


@pytest.mark.core
@pytest.mark.req("N3")
@pytest.mark.parametrize("untried", ["release", "later", "skip"])
def test_a_probe_that_was_not_tried_is_followed_by_another_at_once(
    c: custody.Custody, group: str, clock: Clock, untried: str
) -> None:
    fail(c, 10)
    reason = c.stats("calls", group).breaker_reason
    clock.move(5)
    probe = c.claim("calls", group)
    c.settle(probe.lease_id, {m.offset: Outcome(untried, delay="1h" if untried == "later" else None) for m in probe})
    stats = c.stats("calls", group)
    assert (stats.breaker, stats.breaker_reason) == ("open", reason)
    assert len(c.claim("calls", group, max_messages=9)) == 1
    assert c.claim("calls", group).reason == "breaker_open"


@pytest.mark.core
@pytest.mark.req("N3")
def test_a_probe_that_is_extended_stays_the_only_one(c: custody.Custody, group: str, clock: Clock) -> None:
    fail(c, 10)
    clock.move(5)
    probe = c.claim("calls", group, visibility_timeout="10s")
    clock.move(9)
    probe.extend("10s")
    clock.move(9)
    assert c.claim("calls", group).reason == "breaker_open"
    assert c.next_due("calls", group) == 1
    probe.ack()
    assert c.stats("calls", group).breaker == "closed"


@pytest.mark.core
def test_what_is_due_next_is_the_probe_while_it_is_open_and_nothing_while_paused(
    c: custody.Custody, group: str, clock: Clock
) -> None:
    c.publish("calls", {"n": 100})
    fail(c, 10)
    clock.move(2)
    assert c.next_due("calls", group) == 3  # the failed ones have been due for a second
    c.pause("calls", group)
    assert c.next_due("calls", group) is None
    clock.move(60)
    assert c.next_due("calls", group) is None


@pytest.mark.core
def test_a_due_probe_without_a_message_waits_for_the_next_message(c: custody.Custody, clock: Clock) -> None:
    c.create_topic("calls")
    c.create_group("calls", "caller", replace(POLICY, backoff=Constant("1h")))
    c.publish_many("calls", range(10))
    fail(c, 10)
    clock.move(6)
    assert c.claim("calls", "caller").reason == "empty"
    assert c.next_due("calls", "caller") == 3594


@pytest.mark.core
def test_many_outcomes_are_counted_one_by_one(c: custody.Custody, group: str) -> None:
    """More than the journal rows that are looked at by default, each of one message."""
    assert POLICY.breaker is not None
    c.update_group("calls", group, replace(POLICY, breaker=replace(POLICY.breaker, min_outcomes=150)))
    c.publish_many("calls", range(100))
    for number in range(150):
        assert c.stats("calls", group).breaker == "closed", number
        fail(c, 1)
    assert c.stats("calls", group).breaker == "open"
