"""The size of a pipeline's claims follows how fast its batches are."""

from __future__ import annotations

import pytest

from custody.spark.driver.pacing import Pace

pytestmark = pytest.mark.req("S5")


def sizes(pace: Pace, batches: int, each: float, overhead: float = 0.2) -> list[int]:
    """The sizes of full batches, if a message takes so many seconds."""
    found = []
    for _ in range(batches):
        found.append(pace.size)
        pace.took(pace.size, overhead + each * pace.size)
    return found


def test_quick_batches_grow_to_the_most_that_is_allowed() -> None:
    assert sizes(Pace(most=100_000, aim=10, tasks=2), 6, each=0.000_01) == [500, 2000, 8000, 32_000, 100_000, 100_000]


def test_a_slow_handler_gets_batches_that_take_as_long_as_they_should() -> None:
    pace = Pace(most=100_000, aim=10, tasks=2)
    assert all(0.2 + 0.1 * size == pytest.approx(10, rel=0.05) for size in sizes(pace, 6, each=0.1)[1:])


def test_a_handler_slower_than_the_aim_gets_one_message_at_a_time() -> None:
    assert sizes(Pace(most=100_000, aim=10, tasks=2), 3, each=60)[-1] == 1


def test_it_recovers_from_one_slow_batch() -> None:
    pace = Pace(most=100_000, aim=10, tasks=2)
    sizes(pace, 6, each=0.000_01)
    pace.took(100_000, 100)  # waited for a full sink
    assert pace.size == 10_000
    assert sizes(pace, 3, each=0.000_01) == [10_000, 40_000, 100_000]


def test_a_batch_that_was_not_full_changes_nothing_unless_it_was_slow() -> None:
    pace = Pace(most=100_000, aim=10, tasks=2)
    pace.took(10, 0.1)
    assert pace.size == 500
    pace.took(10, 20)
    assert pace.size == 5


def test_it_never_takes_more_than_is_allowed() -> None:
    assert Pace(most=7, aim=10, tasks=8).size == 7
    pace = Pace(most=7, aim=10, tasks=8)
    pace.took(7, 0.001)
    assert pace.size == 7


@pytest.mark.parametrize("fixed", [2.0, 12.0, 60.0])
def test_what_a_batch_costs_anyway_does_not_make_it_small(fixed: float) -> None:
    """A slow commit elsewhere, say: smaller batches would only pay for it more often."""
    pace = Pace(most=100_000, aim=1, tasks=2)
    assert max(sizes(pace, 12, each=0.000_1, overhead=fixed)) >= 4000
    assert pace.size >= 1000


def test_a_sink_that_stays_full_makes_batches_smaller() -> None:
    """Its readers take a thousand a second: that is how long the results wait for room."""
    pace = Pace(most=100_000, aim=10, tasks=2)
    sizes(pace, 6, each=0.000_01)
    assert pace.size == 100_000
    assert all(size <= 12_000 for size in sizes(pace, 6, each=0.001)[1:])
