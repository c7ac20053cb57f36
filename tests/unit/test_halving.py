"""Outcomes of the rows of a batch: a call that raises is halved, and the order of a key holds whatever fails."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from custody.model.outcomes import Dead, Later, Outcome
from custody.spark.tasks.halving import Answer, Failure, Halving, Outcomes

pytestmark = pytest.mark.req("X8")

NACK = Failure(Outcome("nack", error="marked"))


def stops(outcome: Outcome) -> bool:
    return outcome.stops_key("release")


class Handler:
    """Raises for a call with one of the rows that `break_it`, marks others, and publishes a number for each row."""

    def __init__(self, breaks: set[int], marks: set[int] = frozenset(), error: Exception | None = None) -> None:  # type: ignore[assignment]
        self.breaks, self.marks, self.error = breaks, marks, error or ValueError("broken")
        self.calls: list[list[int]] = []

    def __call__(self, rows: Sequence[int]) -> Answer[int]:
        self.calls.append([*rows])
        if self.breaks & {*rows}:
            raise self.error
        return Answer({row: NACK for row in rows if row in self.marks}, {row: [row] for row in rows})


def outcomes(handler: Handler, keys: Sequence[str | None], halving: Halving[int] | None = None) -> Outcomes[int]:
    return (halving or Halving(stops=stops)).of(keys, handler)


def test_a_sound_batch_is_one_call() -> None:
    handler = Handler(set())
    found = outcomes(handler, ["a", None, "b"])
    assert handler.calls == [[0, 1, 2]]
    assert found.done == {0: [0], 1: [1], 2: [2]}
    assert not found.failed
    assert not found.left


def test_the_rows_that_break_a_call_are_charged_alone() -> None:
    handler = Handler({300, 301, 900})
    found = outcomes(handler, [None] * 1000)
    assert set(found.failed) == {300, 301, 900}
    assert {failure.outcome.error for failure in found.failed.values()} == {"ValueError: broken"}
    assert set(found.done) == {*range(1000)} - {300, 301, 900}
    assert len(handler.calls) < 60


def test_a_failure_releases_the_later_messages_of_its_key_and_no_other() -> None:
    found = outcomes(Handler({1}), ["b", "a", "b", "a", None, "a"])
    assert (set(found.failed), set(found.left), set(found.done)) == ({1}, {3, 5}, {0, 2, 4})


def test_a_mark_releases_the_later_messages_of_its_key_in_the_same_call() -> None:
    handler = Handler(set(), marks={1, 3})
    found = outcomes(handler, ["b", "a", "b", "a", None, "a"])
    assert handler.calls == [[0, 1, 2, 3, 4, 5]]
    assert (set(found.failed), set(found.left), set(found.done)) == ({1}, {3, 5}, {0, 2, 4})


def test_a_key_stays_stopped_in_the_next_batches_of_the_task() -> None:
    halving: Halving[int] = Halving(stops=stops)
    outcomes(Handler({0}), ["a", "b"], halving)
    found = outcomes(Handler(set()), ["a", "b"], halving)
    assert (found.left, set(found.done)) == ([0], {1})


def test_a_skipped_or_dead_message_does_not_stop_its_key() -> None:
    found = outcomes(Handler({0}, error=Dead("no")), ["a", "a"])
    assert (set(found.failed), set(found.done)) == ({0}, {1})
    assert found.failed[0].outcome == Outcome("dead", error="no")


def test_a_postponement_counts_for_the_whole_call() -> None:
    handler = Handler({3}, error=Later("1m"))
    found = outcomes(handler, ["a", "a", "b", None])
    assert handler.calls == [[0, 1, 2, 3]]
    assert ({*found.failed}, found.left) == ({0, 2, 3}, [1])


def test_given_failures_are_never_called_and_stop_their_keys() -> None:
    handler = Handler({4})
    found = Halving[int](stops=stops).of(["a", "a", "b", "b", "c"], handler, {1: NACK, 2: NACK})
    assert all(row in (0, 4) for call in handler.calls for row in call)
    assert ({*found.failed}, found.left, {*found.done}) == ({1, 2, 4}, [3], {0})


def test_the_calls_for_a_batch_are_bounded_and_the_rest_is_released() -> None:
    halving: Halving[int] = Halving(stops=stops, calls=50)
    handler = Handler({*range(200)})
    found = outcomes(handler, [f"k{n}" for n in range(200)], halving)
    assert len(handler.calls) == 50
    assert found.failed
    assert len(found.failed) + len(found.left) == 200
    again = outcomes(Handler(set()), [f"k{n}" for n in found.left[:1]], halving)
    assert not again.done, "a message that was left holds its key"


def test_nothing_more_is_called_once_every_message_fails_alike_from_the_start() -> None:
    handler = Handler({*range(1000)})
    found = outcomes(handler, [None] * 1000, Halving(stops=stops, unproven=True))
    assert len(found.failed) == 13, "ten, and three far from them"
    assert len({max(call) for call in handler.calls if len(call) == 1 and call[0] > 100}) == 3
    assert len(found.failed) + len(found.left) == 1000


def test_a_message_that_succeeds_far_from_the_failed_ones_shows_that_the_code_works() -> None:
    handler = Handler({*range(20)})
    found = outcomes(
        handler, [f"k{n % 7}" if n < 900 else None for n in range(1000)], Halving(stops=stops, unproven=True)
    )
    assert found.done
    assert {*found.failed} == {0, 1, 2, 3, 4, 5, 6}
    assert {*found.done} == {*range(900, 1000)}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.sampled_from("  mx")), max_size=40),
    st.booleans(),
)
def test_no_message_is_done_after_one_of_its_key_that_is_not(
    rows: list[tuple[str | None, str]], unproven: bool
) -> None:
    broken = {row for row, (_, kind) in enumerate(rows) if kind == "x"}
    marked = {row for row, (_, kind) in enumerate(rows) if kind == "m"}
    found = outcomes(Handler(broken, marked), [key for key, _ in rows], Halving(stops=stops, unproven=unproven))
    every = [*found.done, *found.failed, *found.left]
    assert sorted(every) == [*range(len(rows))], "each has one outcome"
    assert not {*found.done} & (broken | marked)
    for row, (key, _) in enumerate(rows):
        earlier = [other for other in range(row) if key is not None and rows[other][0] == key]
        if any(other not in found.done for other in earlier):
            assert row in found.left
    if not unproven:
        assert {*found.failed} == {
            row
            for row, (key, _) in enumerate(rows)
            if row in broken | marked
            and (key is None or not any(rows[other][0] == key and other in broken | marked for other in range(row)))
        }
