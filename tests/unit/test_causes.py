"""When it is the code that fails, and not its messages: all alike from the start on, and enough of them."""

from __future__ import annotations

import pytest

from custody.errors import BreakerOpen
from custody.model.outcomes import Dead, Later, Outcome, Retry
from custody.spark.causes import MALFORMED, MANY, Beginning, cause_in, cause_of
from custody.verbs.pipelines import BatchReport

pytestmark = pytest.mark.req("S3")


def failing(offsets: range, cause: str | None = "KeyError at a.py:3", *, left: int = 0) -> BatchReport:
    failed = {(0, offset): Outcome("nack", error="KeyError: 'x'") for offset in offsets}
    return BatchReport(
        failed=failed, causes={} if cause is None else dict.fromkeys(failed, cause), left={1: [*range(left)]}
    )


def test_a_cause_is_a_type_and_a_place() -> None:
    def raised(values: dict[str, int], error: Exception | None = None) -> str | None:
        try:
            if error is not None:
                raise error
            return str(values["x"])
        except Exception as caught:
            return cause_of(caught)

    here = raised({})
    assert here is not None
    assert here.startswith("KeyError at ")
    assert here == raised({"y": 1})
    assert here != raised({}, KeyError("x")), "another line"
    for decided in (Dead(), Retry(), Later("1s"), ConnectionResetError(), TimeoutError(), BreakerOpen("x")):
        assert raised({}, decided) is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("NameError: name 'x' is not defined", "NameError in the frame"),
        ("my.errors.Odd: a: b", "Odd in the frame"),
        ("[CAST_INVALID_INPUT] The value 'x: y' …", "CAST_INVALID_INPUT in the frame"),
    ],
)
def test_a_cause_of_a_frame_is_read_off_its_error(text: str, cause: str) -> None:
    assert cause_in(text) == cause


def test_many_messages_that_fail_alike_are_enough() -> None:
    assert Beginning().wrong(failing(range(MANY)), MANY) == "KeyError: 'x' (at a.py:3)"
    assert Beginning().wrong(failing(range(MANY), left=5), MANY + 5) is not None, "the rest of their keys was not run"
    assert Beginning().wrong(failing(range(MANY - 1)), MANY - 1) is None


@pytest.mark.parametrize(
    ("kind", "enough"), [("NameError", 1), ("WrongResult", 1), ("TypeError", 3), ("ValueError", MANY)]
)
def test_what_is_hardly_a_messages_fault_needs_fewer(kind: str, enough: int) -> None:
    cause = f"{kind} at a.py:3"
    assert Beginning().wrong(failing(range(enough), cause), enough) is not None
    assert enough == 1 or Beginning().wrong(failing(range(enough - 1), cause), enough - 1) is None


def test_small_batches_add_up_and_the_same_message_counts_once() -> None:
    beginning = Beginning()
    for _ in range(3 * MANY):
        assert beginning.wrong(failing(range(1)), 1) is None
    for offset in range(1, MANY - 1):
        assert beginning.wrong(failing(range(offset, offset + 1)), 1) is None
    assert beginning.wrong(failing(range(MANY - 1, MANY)), 1) is not None


def test_one_success_or_one_decision_or_two_causes_prove_the_code() -> None:
    for first, claimed in ((failing(range(3)), 4), (failing(range(3), None), 3)):
        beginning = Beginning()
        assert beginning.wrong(first, claimed) is None
        assert beginning.over
        assert beginning.wrong(failing(range(100)), 100) is None
    beginning = Beginning()
    assert beginning.wrong(failing(range(3)), 3) is None
    assert beginning.wrong(failing(range(5, 100), "ValueError at a.py:7"), 95) is None


def test_what_does_not_fit_the_schema_says_nothing() -> None:
    beginning = Beginning()
    assert beginning.wrong(failing(range(100), MALFORMED), 100) is None
    assert not beginning.over
    assert beginning.wrong(failing(range(100, 100 + MANY)), MANY) is not None
