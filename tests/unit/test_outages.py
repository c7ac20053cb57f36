"""How long a relay waits: between attempts, and for a destination that is down."""

from __future__ import annotations

import pytest

from custody import Constant, Exponential, Linear
from custody.model.policy import Backoff
from custody.relay.outages import Outages, delay


@pytest.mark.req("O5")
@pytest.mark.parametrize(
    ("backoff", "waits"),
    [
        (Exponential("1s", cap="5s"), [1, 2, 4, 5, 5]),
        (Exponential("1s", multiplier=3, cap="1h"), [1, 3, 9, 27, 81]),
        (Linear("2s", cap="7s"), [2, 4, 6, 7, 7]),
        (Constant("45s"), [45] * 5),
    ],
    ids=str,
)
def test_waits_grow_up_to_the_cap(backoff: Backoff, waits: list[float]) -> None:
    assert [delay(backoff, failures) for failures in range(1, 6)] == waits
    assert delay(backoff, 10_000) == pytest.approx(waits[-1] if waits[-1] < 81 else 3600)


@pytest.mark.req("O5")
def test_jitter_takes_off_up_to_its_share() -> None:
    backoff = Exponential("10s", jitter=0.2)
    assert delay(backoff, 1, dice=lambda: 0.0) == 10
    assert delay(backoff, 1, dice=lambda: 1.0) == pytest.approx(8)


@pytest.mark.req("O12")
def test_a_destination_that_is_down_is_tried_less_and_less_often() -> None:
    now = 0.0
    outages = Outages(Exponential("1s", cap="4s"), clock=lambda: now)
    assert [outages.failed("a:") for _ in range(4)] == [1, 2, 4, 4]
    assert outages.down == ["a:"]
    assert outages.due() == []
    now = 4.0
    assert outages.due() == ["a:"]
    assert outages.over("a:")
    assert not outages.over("a:")
    assert outages.failed("a:") == 1, "it begins anew"


def test_what_did_not_arrive_in_three_outages_is_suspected_when_another_event_has() -> None:
    outages = Outages(Exponential("1s"))
    for suspects in (set[int](), set[int](), {3}):
        outages.failed("a")
        for event in (3, 4):
            outages.tried("a", event)
        outages.tried("a", 5, suspected=False)
        assert outages.last("a") == 5
        assert outages.over("a", 4)
        assert outages.suspects == suspects
    outages.settled(3)
    assert outages.suspects == set()


def test_nothing_is_suspected_when_there_was_nothing_left_to_try() -> None:
    outages = Outages(Exponential("1s"))
    outages.failed("a")
    outages.tried("a", 3)
    assert outages.over("a")
    assert outages.suspects == set()
