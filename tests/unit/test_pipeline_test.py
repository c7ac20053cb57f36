"""`Pipeline.test`: handlers run on messages of a test, without Spark and without a database."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import custody
from custody.errors import InvalidArgument, PipelineRefused
from custody.spark import Files, Pipeline, To, expect, fail, skip
from custody.spark.batch_handlers import Form
from custody.spark.tasks.ddl import fields_of

pytestmark = pytest.mark.req("X8")

ORDERED = custody.Policy(ordering="key", max_attempts=3)


def pipeline(**settings: Any) -> Pipeline:
    return Pipeline(**({"source": "in", "group": "g", "sink": ["out", "alerts"], "policy": ORDERED} | settings))


def test_each_with_outcomes_outputs_and_the_order_of_a_key() -> None:
    made = pipeline(schema="n int")

    @made.each
    def handle(message: custody.Message) -> object:
        n = message.payload["n"]
        if n == 1:
            raise custody.Retry("again", after="1m")
        if n == 3:
            raise custody.Dead("never")
        return [{"n": n}, To("large", topic="alerts", key="x", headers={"h": "1"})] if n == 4 else {"n": n}

    tested = made.test([{"n": n} for n in range(5)], key="a")
    assert tested.outcomes == ["ack", "nack", "release", "release", "release"]
    assert (tested[1].error, tested[1].delay) == ("again", 60.0)
    assert [(output.topic, output.key, output.payload) for output in tested.outputs] == [("out", "a", {"n": 0})]

    other = made.test([custody.Outgoing({"n": 3}, key="a"), {"n": 4}, {"n": "x"}, "text"])
    assert other.outcomes == ["dead", "ack", "dead", "dead"]
    assert "does not fit the schema" in str(other.errors[2])
    output = other[1].outputs[1]
    assert (output.topic, output.key, output.payload, output.headers) == ("alerts", "x", "large", {"h": "1"})


def test_batch_does_the_same_as_each() -> None:
    made = pipeline(schema="n int")

    @made.batch(rows=3)
    def handle(rows: pa.RecordBatch) -> pa.RecordBatch:
        n = rows.column("n")
        if pc.any(pc.equal(n, 1)).as_py():
            raise ValueError("one")
        return skip(fail(rows, pc.equal(n, 6), "six", retry_after="1m"), pc.equal(n, 2), "two")

    keyed = [custody.Outgoing({"n": n}, key=f"k{n % 2}") for n in range(8)]
    tested = made.test([*keyed, {"n": "x"}])
    assert tested.outcomes == ["ack", "nack", "skip", "release", "ack", "release", "nack", "release", "dead"]
    assert (tested[1].error, tested[6].delay) == ("ValueError: one", 60.0)
    assert [output.payload for output in tested.outputs] == [{"n": 0}, {"n": 4}]
    assert len(tested) == 9
    assert [one.message.offset for one in tested[2:4]] == [2, 3]


def test_expectations_of_single_messages_are_counted() -> None:
    made = pipeline()

    @made.each
    def handle(message: custody.Message) -> object:
        expect("named", message.payload.get("name"), on="warn")
        expect("positive", message.payload["n"] > 0)
        expect("small", np.int64(message.payload["n"]) < 10, on="retry")
        return message.payload

    tested = made.test([{"n": 1, "name": "a"}, {"n": 2}, {"n": 0}, {"n": 11, "name": ""}])
    assert tested.outcomes == ["ack", "ack", "dead", "nack"]
    assert tested.errors[2:] == ["expectation 'positive' is not met", "expectation 'small' is not met"]
    assert tested.unmet == {"named": 3, "positive": 1, "small": 1}
    assert made.test([{"n": 1, "name": "a"}]).unmet == {}


@pytest.mark.parametrize("form", ["arrow", "pandas"])
def test_expectations_of_batches_are_counted_once_for_each_message(form: Form) -> None:
    made = pipeline(schema="n int, name string")

    @made.batch(form=form)
    def handle(rows: Any) -> Any:
        n = rows["n"]
        if form == "pandas":
            twice = pd.concat([rows, rows])
            masks = {"named": twice["name"].notna(), "positive": twice["n"] > 0, "small": twice["n"] < 10}
        else:
            if pc.any(pc.equal(n, 5)).as_py():
                raise ValueError("five")  # the halves are counted, and not the whole
            twice = pa.Table.from_batches([rows, rows])
            masks = {
                "named": pc.is_valid(twice["name"]),
                "positive": pc.greater(twice["n"], 0),
                "small": pc.less(twice["n"], 10),
            }
        twice = expect("named", masks["named"], on="warn")(twice)
        twice = expect("positive", masks["positive"])(twice)
        return expect("small", masks["small"], on="retry")(twice)

    messages = [{"n": 1, "name": "a"}, {"n": 2}, {"n": 0, "name": "b"}, {"n": 11}, {"name": "c"}, {"n": 5, "name": "d"}]
    tested = made.test(messages)
    assert tested.outcomes == ["ack", "ack", "dead", "nack", "dead", "ack" if form == "pandas" else "nack"]
    assert tested.errors[2] == "expectation 'positive' is not met"
    assert tested.unmet == {"named": 2, "positive": 2, "small": 2}
    assert "_unmet" not in tested[0].outputs[0].payload


def test_what_was_not_done_behind_its_key_is_not_counted() -> None:
    made = pipeline(schema="n int")
    made.batch(lambda rows: expect("positive", pc.greater(rows["n"], 0), on="retry")(rows))
    tested = made.test([{"n": 0}, {"n": 0}], key="a")
    assert (tested.outcomes, tested.unmet) == (["nack", "release"], {"positive": 1})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("", True), "needs a name"),
        (("x", True, "die"), "on cannot be 'die'"),
        (("x", np.array([True, False])), "a mask has 2"),
    ],
)
def test_a_wrong_expectation_is_refused(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(Exception, match=told):
        expect(*arguments)(pa.table({"_partition": [0]}))


def test_a_redelivery_has_its_attempt_and_headers() -> None:
    made = pipeline()

    @made.each
    def handle(message: custody.Message) -> object:
        return [message.attempt, message.headers["x-custody-last-error"], message.headers["a"]]

    found = made.test([custody.Outgoing({}, headers={"a": "b"})], attempt=2, last_error="no answer")
    assert [output.payload for output in found.outputs] == [2, "no answer", "b"]


def test_a_message_from_elsewhere_and_a_sink_outside() -> None:
    made = pipeline(sink=Files("/nowhere"), policy=None)
    made.each(lambda message: message.payload)
    first = made.test([{"n": 1}], key="a")[0].message
    again = made.test([first, b"\xff"])
    assert [(output.topic, output.key, output.payload) for output in again.outputs] == [(None, "a", {"n": 1})]
    assert "bytes cannot be a row" in str(again.errors[1])


def test_a_frame_is_refused() -> None:
    made = pipeline()
    made.frame(lambda messages: messages)
    with pytest.raises(PipelineRefused, match=r"only Spark can run.*try_out"):
        made.test([])


def test_it_starts_no_java() -> None:
    from pyspark import SparkContext

    made = pipeline()
    made.each(lambda _: None)
    before = SparkContext._gateway
    assert made.test([1, 2]).outcomes == ["ack", "ack"]
    assert SparkContext._gateway is before


@pytest.mark.parametrize(
    "schema", ["n", "n int,", "n int m int", "n array<int", "n money", "n int; m int", "n decimal(1"]
)
def test_a_schema_that_cannot_be_read_is_refused(schema: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read at"):
        fields_of(schema)
