"""A task begins no message that its claim may not hold any more. The task runs in this process, without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

import custody
from custody import elapsed
from custody.spark.tasks import each
from custody.spark.tasks.job import Job, gather
from custody.verbs.pipelines import DriverVerbs

VISIBILITY = 60.0


class Later:
    """This process's own clock, which can be moved on: as a stop of the process moves it."""

    def __init__(self) -> None:
        self.by = 0.0

    def __call__(self) -> float:
        return elapsed.elapsed() + self.by


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    clock = Later()
    monkeypatch.setattr("custody.spark.database.tasks.elapsed", clock)
    return clock


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in")
        opened.create_group("in", "g", custody.Policy(visibility_timeout=VISIBILITY))
        opened.publish_many("in", list(range(10)))
        yield opened


def run(c: custody.Custody, at_four: Callable[[DriverVerbs], object]) -> tuple[list[int], list[int]]:
    """What the handler was called with, and what the task left."""
    drive, _ = c.drive("in", "g", visibility_timeout=VISIBILITY)
    number = drive.claim(100).number
    job = Job(
        url=c.database_url, topic="in", group="g", group_id=drive.driver.group_id, ordered=False, on_dead="release",
        handler_timeout=None, sinks={}, schema=None,
    )  # fmt: skip
    began: list[int] = []

    def handle(message: custody.Message) -> None:
        began.append(message.payload)
        if message.payload == 4:
            at_four(drive)

    references = pa.RecordBatch.from_pydict(
        {
            "_claim": [number] * 10,
            "_partition": [0] * 10,
            "_offset": list(range(10)),
            "_share": [0] * 10,
            "_of": [1] * 10,
        }
    )
    _, work, _ = gather(pa.Table.from_batches(list(each.task(job, handle)(iter([references])))))
    return began, work.left.get(0, [])


@pytest.mark.req("X2")
def test_a_task_that_stood_still_begins_nothing_of_what_its_claim_has_lost(c: custody.Custody, later: Later) -> None:
    def stand_still(_: object) -> None:
        c.rewind("in", "g", to_offset=0)  # the leases are gone, as if they had run out and somebody else had claimed
        later.by = VISIBILITY

    assert run(c, stand_still) == ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])


@pytest.mark.req("X2")
def test_a_task_goes_on_where_its_driver_has_renewed_the_leases(c: custody.Custody, later: Later) -> None:
    def stand_still(drive: DriverVerbs) -> None:
        assert drive.keep() == 10
        later.by = VISIBILITY

    assert run(c, stand_still) == (list(range(10)), [])
