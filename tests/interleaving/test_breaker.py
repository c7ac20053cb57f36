"""The breaker beside other sessions: whoever changes it decides on the row that it has locked."""

from __future__ import annotations

from uuid import UUID

import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("N3")]

BREAKER = custody.Breaker(failure_rate=0.5, min_outcomes=4, window="60s", probe_after="5s")


@pytest.fixture
def leases(make: Make, one: Session) -> list[UUID | None]:
    """Two leases of four messages each, enough failures in each to open the breaker; and 92 messages more."""
    make([None] * 100, ordering="none", max_attempts=9, breaker=BREAKER)
    found = [one.claim(4).lease_id for _ in range(2)]
    one.commit()
    return found


def opened(c: custody.Custody, one: Session) -> int:
    """How often the breaker has changed its state."""
    rows = one.connection.execute("SELECT count(*) FROM custody.history WHERE kind = 'breaker'").fetchall()
    one.commit()
    return int(rows[0][0])


def test_two_settles_open_it_once(c: custody.Custody, leases: list[UUID], one: Session, two: Session) -> None:
    one.nack(leases[0], 0, 1, 2, 3)
    second = two.blocked(two.nack, leases[1], 4, 5, 6, 7)
    one.commit()
    assert second.result(10).lost == []
    two.commit()
    assert c.stats(TOPIC, GROUP).breaker == "open"
    assert opened(c, one) == 1


def test_a_failure_from_before_does_not_open_it_again_after_a_success(
    c: custody.Custody, leases: list[UUID], one: Session, two: Session, three: Session, clock: Clock
) -> None:
    """The settle in the middle reads closed, and waits while the breaker opens, is probed and closes."""
    one.nack(leases[0], 0, 1, 2, 3)
    late = two.blocked(two.nack, leases[1], 4, 5, 6, 7)
    clock.move(6)
    probe = one.claim()
    one.ack_lease(probe.lease_id)
    one.commit()
    assert late.result(10).lost == []
    two.commit()
    assert c.stats(TOPIC, GROUP).breaker == "closed"
    assert opened(c, one) == 2


@pytest.mark.parametrize("first", ["nack", "ack"])
def test_a_failure_from_before_leaves_a_running_probe_alone(
    c: custody.Custody, leases: list[UUID], one: Session, two: Session, clock: Clock, first: str
) -> None:
    one.nack(leases[0], 0, 1, 2, 3)
    late = two.blocked(two.settle, leases[1], {4: first, 5: "nack", 6: "nack", 7: "nack"})
    clock.move(6)
    probe = one.claim()
    one.commit()
    late.result(10)
    two.commit()
    assert c.stats(TOPIC, GROUP).breaker == "probing"
    assert one.ack(probe.lease_id, *probe.offsets).lost == []
    one.commit()
    assert c.stats(TOPIC, GROUP).breaker == "closed"


def test_an_open_settle_that_changes_nothing_holds_nobody_up(
    c: custody.Custody, leases: list[UUID], one: Session, two: Session, clock: Clock
) -> None:
    """A settle writes rows that refer to the group. That must not keep a probe or an operator from the group's row."""
    one.nack(leases[0], 0, 1, 2, 3)
    one.commit()
    one.nack(leases[1], 4)  # stays open
    clock.move(5)
    assert len(two.claim(9).offsets) == 1
    two.commit()
    two.connection.execute("SET lock_timeout = '2s'")
    two.call("resume", topic=TOPIC, group=GROUP)
    two.commit()
    assert c.stats(TOPIC, GROUP).breaker == "closed"


def test_two_claims_at_once_make_one_probe(
    c: custody.Custody, leases: list[UUID], one: Session, two: Session, clock: Clock
) -> None:
    """The second one may have another partition to take from, so it is the group's row that tells it to wait."""
    one.nack(leases[0], 0, 1, 2, 3)
    one.commit()
    clock.move(5)
    assert len(one.claim(9).offsets) == 1
    two.connection.execute("SET lock_timeout = '2s'")
    assert two.claim(9).reason == "breaker_open"
    one.commit()
    two.commit()
    assert two.claim(9).reason == "breaker_open"


def test_an_extension_of_an_earlier_probe_does_not_put_off_the_next_one(
    leases: list[UUID], one: Session, two: Session, clock: Clock
) -> None:
    one.nack(leases[0], 0, 1, 2, 3)
    clock.move(5)
    probe = one.claim()
    one.commit()
    one.call("resume", topic=TOPIC, group=GROUP, now=clock())
    clock.move(1)
    one.nack(leases[1], 4, 5, 6, 7)
    clock.move(5)
    assert len(one.claim(9, visibility=10).offsets) == 1, "it is open again, and this is another probe"
    extending = two.blocked(two.extend, probe.lease_id, 1000)
    one.commit()
    assert extending.result(10) is not None
    two.commit()
    clock.move(10)
    assert len(two.claim(9).offsets) == 1
