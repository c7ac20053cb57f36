"""The circuit breaker: closed, open, probing, closed again; and an outage that dead-letters nothing."""

from __future__ import annotations

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
