"""The arguments of a pipeline: a wrong one is refused where the pipeline is defined, with what to write instead."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import custody
from custody.errors import CustodyError, InvalidArgument
from custody.spark import Files, Pipeline
from custody.spark.settings import RunSettings

pytestmark = pytest.mark.req("S2")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"source": ["in", "more"]}, "source must be one name, not a list"),
        ({"source": 7}, "source must be a name, not 7"),
        ({"source": ""}, "source must be a name, not ''"),
        ({"group": None}, "group must be a name, not None"),
        ({"sink": 7}, "sink cannot be 7"),
        ({"sink": ["out", 7]}, r"sink\[1\] cannot be 7"),
        ({"sink": ["out", "out"]}, "the topic 'out' twice"),
        ({"sink": {"out"}}, "sink cannot be"),
        ({"sink": Path("/data/out")}, r"sink is a path.*Files\('/data/out'\)"),
        ({"sink": Files}, r"sink is the class Files.*Files\(…\)"),
        ({"sink": print}, "sink is a function.*@pipeline.write"),
        ({"policy": {"ordering": "key"}}, r"the policy must be a Policy, not a dict.*custody\.Policy\(ordering=…\)"),
        ({"policy": "key"}, "the policy must be a Policy, not a str"),
        ({"schema": ["n int"]}, "the schema must be a string, not list.*'sku string, add int'"),
        ({"schema": ""}, "the schema must be a string, not ''"),
        ({"schema": "  "}, "the schema must be a string, not '  '"),
        (
            {"sink": Files("/data/out", schema=7)},
            "the schema of the parquet files in /data/out must be a string, not int",
        ),  # type: ignore[arg-type]
        ({"start": "earlist"}, "start cannot be 'earlist'. Did you mean 'earliest'"),
        ({"start": None}, "start cannot be None"),
        ({"start": True}, "start cannot be True"),
        ({"start": 2**70}, "start cannot be 1180591620717411303424"),
        ({"start": datetime(2026, 1, 1)}, "zone"),
        ({"bindings": 7}, "bindings cannot be 7"),
        ({"bindings": [7]}, "a pattern is a string, not 7"),
        ({"sinks": ["out"]}, "Pipeline has no argument 'sinks'. Did you mean 'sink'"),
        ({"polcy": None}, "Did you mean 'policy'"),
        ({"zzz": None}, "Known are: source, group, sink"),
    ],
)
def test_a_wrong_argument_is_refused_at_the_definition(given: dict[str, Any], told: str) -> None:
    with pytest.raises(CustodyError, match=told) as refused:
        Pipeline(**({"source": "in", "group": "g"} | given))
    assert isinstance(refused.value, InvalidArgument)
    assert refused.value.remedy or "pattern" in told


def test_right_arguments_are_taken() -> None:
    files = Files(Path("/data/out"), partition_by=["day"])
    pipeline = Pipeline(source="in", group="g", sink=("out", files), bindings="orders.>", start=3, schema="n int")
    assert (pipeline.sinks, pipeline.outside, files.path) == (("out",), (files,), "/data/out")
    assert Pipeline(source="in", group="g").bindings is None


async def awaiting(_message: custody.Message) -> None: ...


async def streaming(_message: custody.Message) -> AsyncIterator[int]:
    yield 1


def generating(_message: custody.Message) -> Iterator[int]:
    yield 1


async def saving_later(_rows: object, _write: object) -> None: ...


def saving_in_parts(_rows: object, _write: object) -> Iterator[int]:
    yield 1


def test_a_write_that_has_yet_to_run_is_not_taken_for_one() -> None:
    pipeline: Any = Pipeline(source="in", group="g")
    pipeline.write(lambda rows, write: saving_later(rows, write))
    with pytest.raises(TypeError, match=r"function .* returned a coroutine, which is not awaited"):
        pipeline.outside[0].stage(None, None)


def test_functions_of_the_wrong_kind_are_refused_at_the_definition() -> None:
    pipeline: Any = Pipeline(source="in", group="g")
    for wrong, told in (
        (awaiting, "async def"),
        (streaming, "async generator"),
        (7, "the handler is of type int, which cannot be called"),
        (lambda: None, r"Define it as def handler\(message\)"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            pipeline.each(wrong)
    with pytest.raises(InvalidArgument, match=r"Define it as def frame\(messages\)"):
        pipeline.frame(lambda a, b: (a, b))
    with pytest.raises(InvalidArgument, match="the frame is a coroutine function"):
        pipeline.frame(awaiting)
    for wrong, told in (
        (lambda rows: rows, r"def write\(rows, write\)"),
        ("save", r"def write\(rows, write\)"),
        (saving_later, "the function of write is a coroutine function"),
        (saving_in_parts, "the function of write has a yield"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            pipeline.write(wrong)
    with pytest.raises(InvalidArgument, match="the schema must be a string, not int"):
        pipeline.write(schema=7)(lambda _rows, _write: None)
    assert pipeline.handler is pipeline.transform is None
    assert pipeline.outside == ()
    assert pipeline.each(generating) is generating


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_per_batch": "many"}, "max_per_batch cannot be 'many'"),
        ({"max_per_batch": 0}, "max_per_batch cannot be 0"),
        ({"on_batch": 7}, "on_batch must be a function, not a int"),
        ({"drain": "soon"}, "'soon' is not a duration"),
    ],
)
def test_wrong_settings_of_a_run_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        RunSettings(**given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"path": 7}, "files need a path"),
        ({"partition_by": "day"}, r"\['day'\]"),
        ({"format": 7}, "7 is not a format of plain files"),
        ({"options": [7]}, r"options cannot be \[7\]"),
    ],
)
def test_wrong_arguments_of_files_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        Files(**({"path": "/data/out"} | given))
