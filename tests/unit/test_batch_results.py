"""Results of a batch handler: each row is an output of its message, a mark is an outcome, and the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from tests.unit.test_message_columns import messages

from custody.model.outcomes import Outcome, Skip
from custody.spark import fail, skip
from custody.spark.batch_handlers import BatchHandler, Form
from custody.spark.causes import WrongResult
from custody.spark.tasks.calls import Calls
from custody.spark.tasks.halving import Outcomes
from custody.spark.tasks.job import Job
from custody.verbs.pipelines import Sink

pytestmark = pytest.mark.req("X8")

SCHEMA = {"type": "struct", "fields": [{"name": "n", "type": "long"}, {"name": "text", "type": "string"}]}
SINKS = {"out": Sink(1, 4), "alerts": Sink(2, 1)}


def job(**settings: Any) -> Job:
    given = {"sinks": SINKS, "schema": SCHEMA, "ordered": True, "on_dead": "release", "handler_timeout": None}
    return Job(url="", topic="in", group="g", group_id=0, **(given | settings))


def batch(count: int = 4, keys: str = "abcd") -> pa.RecordBatch:
    found = messages([f'{{"n":{n},"text":"t{n}"}}'.encode() for n in range(count)])
    return found.set_column(2, "_key", pa.array([*keys[:count]]))


def run(
    function: Callable[[Any], object], rows: pa.RecordBatch | None = None, *, form: Form = "arrow", **settings: Any
) -> Outcomes[Any]:
    return Calls(job(**settings), BatchHandler(function=function, form=form)).of(batch() if rows is None else rows)


def payloads(found: Outcomes[Any]) -> list[list[bytes]]:
    return [[encoded[2] for _, _, encoded in found.done[row]] for row in sorted(found.done)]


def test_the_columns_without_an_underscore_are_the_payload() -> None:
    found = run(lambda rows: rows.append_column("double", pc.multiply(rows.column("n"), 2)))
    assert payloads(found)[3] == [b'{"n":3,"text":"t3","double":6}']
    topic, place, (key, kind, _, headers) = found.done[3][0]
    assert (topic, key, kind, headers) == (SINKS["out"], "d", b"j", None)
    assert place == SINKS["out"].layout.place_key("d")


def test_without_such_columns_the_payload_is_published_unchanged() -> None:
    assert payloads(run(lambda rows: rows.select(["_partition", "_offset"])))[2] == [b'{"n":2,"text":"t2"}']
    kept = run(
        lambda rows: rows.select(["_partition", "_offset", "_payload", "_kind"]), messages([b"\xff"], "b"), schema=None
    )
    assert kept.done[0][0][2][1:3] == (b"b", b"\xff")


def test_none_one_or_several_rows_in_any_order() -> None:
    def handle(rows: pa.RecordBatch) -> pa.Table:
        odd = rows.filter(pc.equal(pc.bit_wise_and(rows.column("n"), 1), 1))
        return pa.Table.from_batches([odd, odd.set_column(1, "text", pa.array(["again"] * odd.num_rows))]).select(
            ["text", "_offset", "_partition"]
        )

    found = run(handle)
    assert payloads(found) == [[], [b'{"text":"t1"}', b'{"text":"again"}'], [], [b'{"text":"t3"}', b'{"text":"again"}']]
    assert found.done[1][0][2][0] == "b", "an output has the key of its message"
    assert payloads(run(lambda _: None)) == [[]] * 4


def test_topic_key_and_headers_may_be_set() -> None:
    def handle(rows: pa.RecordBatch) -> pa.Table:
        found = rows.select(["n", "_partition", "_offset"])
        found = found.append_column("_topic", pa.array([None, "alerts", "other", None]))
        found = found.append_column("_key", pa.array(["x", None, "x", "nul\0"]))
        headers = pa.array(
            [[("h", "1"), ("x-custody-delivery-count", "2")], None, None, None], pa.map_(pa.string(), pa.string())
        )
        return found.append_column("_headers", headers)

    found = run(handle)
    assert found.done[0][0][2] == ("x", b"j", b'{"n":0}', b'{"h":"1"}')
    assert (found.done[1][0][0], found.done[1][0][2][0]) == (SINKS["alerts"], None)
    assert "'other' is not a sink" in str(found.failed[2].outcome.error)
    assert "NUL" in str(found.failed[3].outcome.error)


def test_fail_and_skip_mark_rows_and_the_first_mark_counts() -> None:
    def handle(rows: pa.RecordBatch) -> pa.RecordBatch:
        rows = fail(rows, pc.equal(rows.column("n"), 1), "one", dead=True)
        rows = fail(rows, [False, True, True, False], ["", "", "two", ""], retry_after="1m")
        return skip(rows, pa.array([None, None, True, True]), "not needed")

    found = run(handle)
    assert {row: failure.outcome for row, failure in found.failed.items()} == {
        1: Outcome("dead", error="one"),
        2: Outcome("nack", error="two", delay=60.0),
        3: Outcome("skip", error="not needed"),
    }
    assert all(failure.cause is None for failure in found.failed.values()), "decisions of the code"
    assert [*found.done] == [0]


def test_one_marked_row_fails_its_message_with_all_its_rows() -> None:
    def handle(rows: pa.RecordBatch) -> pa.Table:
        twice = pa.Table.from_batches([rows, rows])
        return fail(twice, [False] * 5 + [True] + [False] * 2, "the second row of one")

    found = run(handle)
    assert [*found.failed] == [1]
    assert sorted(found.done) == [0, 2, 3]


def test_an_outcome_column_may_be_written_by_hand() -> None:
    kinds = pa.array([None, "dead", "skip", "nack"])
    found = run(lambda rows: rows.append_column("_outcome", kinds))
    assert [found.failed[row].outcome.kind for row in (1, 2, 3)] == ["dead", "skip", "nack"]
    wrong = run(lambda rows: rows.append_column("_outcome", pa.array(["ok"] * rows.num_rows)))
    assert "the _outcome 'ok'" in str(wrong.failed[0].outcome.error)


def test_pandas_keeps_whole_numbers_and_headers() -> None:
    seen: list[str] = []

    def handle(frame: pd.DataFrame) -> pd.DataFrame:
        seen.append(str(frame["n"].dtype))
        frame["half"] = frame["n"] / 2
        frame["at"] = pd.Timestamp("2026-01-01T00:00:00Z")
        return fail(frame.drop(columns="text"), frame["n"] == 2, "two")

    rows = messages([b'{"n":1}', b'{"text":"x"}', b'{"n":2}'])
    headers = pa.array([[("a", "1")], None, [("b", "2")]], pa.map_(pa.string(), pa.string()))
    found = run(handle, rows.set_column(5, "_headers", headers), form="pandas")
    assert seen == ["Int64"]
    assert payloads(found) == [
        [b'{"n":1,"half":0.5,"at":"2026-01-01T00:00:00Z"}'],
        [b'{"n":null,"half":null,"at":"2026-01-01T00:00:00Z"}'],
    ]
    assert found.done[0][0][2][3] == b'{"a":"1"}'
    assert [*found.failed] == [2]


def test_numbers_that_json_does_not_have_fail_their_message() -> None:
    found = run(lambda rows: rows.append_column("x", pa.array([1.5, float("nan"), None, float("inf")])))
    assert sorted(found.failed) == [1, 3]
    assert "JSON has no NaN" in str(found.failed[1].outcome.error)


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda rows: [rows], "returned a list"),
        (lambda rows: rows.select(["n"]), "without _partition and _offset"),
        (
            lambda rows: rows.set_column(3, "_offset", pa.array([70 + n for n in range(rows.num_rows)])),
            "no message of its batch",
        ),
        (lambda _: (row for row in ()), "returned a generator"),
        (lambda rows: fail(rows, [True], "x") if rows.num_rows > 1 else 5, "returned a int"),
    ],
)
def test_a_wrong_result_fails_each_message(returned: Callable[[Any], object], told: str) -> None:
    found = run(returned)
    assert len(found.failed) == 4
    for failure in found.failed.values():
        assert told in str(failure.outcome.error)
        assert str(failure.cause).startswith(WrongResult.__name__)


def test_a_decision_that_is_returned_counts_as_raised() -> None:
    assert {failure.outcome.kind for failure in run(lambda _: Skip("no")).failed.values()} == {"skip"}


def test_rows_for_sinks_outside_have_no_bytes() -> None:
    found = run(lambda rows: rows, messages([b"\xff", b"text"], "bt"), schema=None, sinks={}, keeps=True)
    assert "bytes cannot be a row" in str(found.failed[0].outcome.error)
    assert found.done[1] == [(None, 0, (None, b"t", b"text", None))]


def test_malformed_messages_are_dead_and_hold_their_key_by_the_policy() -> None:
    rows = messages([b"{}", b"no", b"{}", b"{}"]).set_column(2, "_key", pa.array([*"aaab"]))
    found = run(lambda rows: rows, rows, on_dead="hold")
    assert (found.failed[1].outcome.kind, found.failed[1].cause) == ("dead", "malformed")
    assert (found.left, sorted(found.done)) == ([2], [0, 3])
    assert sorted(run(lambda rows: rows, rows).done) == [0, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"form": "polars"}, "form cannot be 'polars'"),
        ({"rows": 0}, "rows cannot be 0"),
        ({"rows": 20_000}, "from 1 to 10,000"),
        ({"function": lambda: None}, "takes ()"),
        ({"function": 5}, "cannot be called"),
    ],
)
def test_a_wrong_definition_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(Exception, match=told.replace("(", r"\(").replace(")", r"\)")):
        BatchHandler(**({"function": lambda rows: rows} | arguments))


def test_times_before_and_after_are_written_alike() -> None:
    found = run(
        lambda rows: rows.append_column(
            "at", pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * 4, pa.timestamp("ns", "UTC"))
        )
    )
    assert b'"at":"2026-01-01T00:00:00Z"' in payloads(found)[0][0]
