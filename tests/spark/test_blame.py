"""Whose fault a failure is, and how a guilty message is found: without a Spark, by what Spark is known to say."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, NumberFormatException, PythonException

from custody.errors import ClaimLost, PipelineFenced
from custody.model.outcomes import Outcome
from custody.spark.driver.group_reader import references
from custody.spark.driver.isolate import Isolation, Reference, Sliced
from custody.spark.faults import NotTheRows, TaskFailed, TookTooLong, decisive, described, fault, is_second_try, ours
from custody.spark.tasks.events import Reader
from custody.spark.tasks.job import Job, Report, gather
from custody.verbs.pipelines import BatchReport, Sink, StagedCount

pytestmark = pytest.mark.req("S3")
LOST = (
    "Job aborted due to stage failure: Task 0 in stage 3.0 failed 4 times, most recent failure: "
    "Lost task 0.3 in stage 3.0 (TID 9) (host executor driver): "
)


def raised(line: str) -> PythonException:
    frames = 'Traceback (most recent call last):\n  File "worker.py", line 1, in main\n    process()\n'
    text = f"{LOST}org.apache.spark.api.python.PythonException: {frames}{line}"
    return PythonException(f"{text}\n\n\tat org.apache.X(X.scala)")


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: custody.errors.PipelineFenced: x",
        "ValueError: Connection refused",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "ValueError: ModuleNotFoundError: No module named x",
        "ValueError: SparkContext was shut down",
    ],
)
def test_what_user_code_raises_is_its_rows_fault_whatever_it_says(line: str) -> None:
    assert fault(raised(line)) == "row"
    assert ours(raised(line)) is None
    assert described(raised(line)) == line


def test_a_value_in_an_error_of_spark_decides_nothing() -> None:
    for value in ("Connection refused", "custody.errors.TopicNotFound: x", "java.lang.OutOfMemoryError"):
        error = NumberFormatException(f"[CAST_INVALID_INPUT] The value '{value}' of the type STRING cannot be cast")
        assert fault(error) == "row"


def test_what_custody_raises_in_a_task_is_nobodys_fault() -> None:
    error = raised("custody.errors.PipelineFenced: epoch 2 drives it now. Stop this one.")
    assert fault(error) == "infrastructure"
    assert isinstance(ours(error), PipelineFenced)
    assert isinstance(ours(raised("custody.errors.ClaimLost: gone")), ClaimLost)


def test_the_first_attempt_decides_whose_fault_it_is() -> None:
    row, away = raised("ValueError: x"), raised("custody.errors.DatabaseUnavailable: it restarts")
    again = raised("custody.spark.faults.SecondTry: its first attempt has failed")
    assert is_second_try(again)
    assert not is_second_try(raised("ValueError: custody.spark.faults.SecondTry: x"))
    for attempts, blamed in (([row, again], row), ([again, away], away), ([row, away, again], away), ([again], None)):
        told = [TaskFailed(str(one)) for one in attempts]
        found = decisive(told)
        assert found == (None if blamed is None else told[attempts.index(blamed)])
    assert fault(TaskFailed(str(away))) == "infrastructure"
    assert fault(TaskFailed(REASONS[0])) == "infrastructure"
    assert fault(TaskFailed("org.apache.spark.SparkNumberFormatException: [CAST_INVALID_INPUT] '1x'")) == "row"


REASONS = ["ExecutorLostFailure (executor 1 exited caused by …)", "java.lang.OutOfMemoryError: Java heap space"]


@pytest.mark.parametrize("reason", REASONS)
def test_a_lost_executor_is_nobodys_fault(reason: str) -> None:
    assert fault(RuntimeError(LOST + reason)) == "infrastructure"


def test_code_that_executors_cannot_load_is_the_pipelines_fault() -> None:
    assert fault(raised("ModuleNotFoundError: No module named 'mine'")) == "pipeline"
    assert fault(AnalysisException("[UNRESOLVED_COLUMN] …")) == "pipeline"


class Jobs:
    """Jobs that fail if they have a bad message."""

    def __init__(self, *bad: int, always: bool = False) -> None:
        self.bad, self.always, self.ran = set(bad), always, 0

    def __call__(self, part: list[Reference]) -> BatchReport:
        self.ran += 1
        if self.always or any(offset in self.bad for _, offset in part):
            raise raised("ValueError: no")
        return BatchReport()


def messages(count: int) -> list[Reference]:
    return [(0, offset) for offset in range(count)]


@pytest.mark.parametrize("bad", [[0], [99_999], [5, 6], [1, 50_000, 99_000], list(range(4))])
def test_only_the_guilty_are_charged(bad: list[int]) -> None:
    jobs = Jobs(*bad)
    work = Isolation(run=jobs, stopping=lambda: False).of(messages(100_000))
    assert sorted(work.failed) == [(0, offset) for offset in bad]
    assert work.left == {}
    assert jobs.ran <= 40 * len(bad)


def test_a_single_bad_message_is_charged_too() -> None:
    assert list(Isolation(run=Jobs(0), stopping=lambda: False).of(messages(1)).failed) == [(0, 0)]


def test_nobody_is_charged_if_nothing_can_go_well() -> None:
    with pytest.raises(NotTheRows, match="even without messages"):
        Isolation(run=Jobs(always=True), stopping=lambda: False).of(messages(1000))
    assert fault(NotTheRows("x")) == "infrastructure"


def test_what_the_jobs_do_not_suffice_for_is_given_back() -> None:
    work = Isolation(run=Jobs(*range(100)), stopping=lambda: False, jobs=50).of(messages(1000))
    assert len(work.failed) + sum(map(len, work.left.values())) <= 1000
    assert work.left
    assert all(offset < 100 for _, offset in work.failed)


def test_what_fails_for_every_message_ends_early_if_nothing_has_worked_yet() -> None:
    jobs = Jobs(*range(100_000))
    work = Isolation(run=jobs, stopping=lambda: False, unproven=True).of(messages(100_000))
    assert len(work.failed) == 13, "enough, and some far from those"
    assert {offset // 30_000 for _, offset in work.failed} == {0, 1, 2}
    assert set(work.causes.values()) == {"ValueError in the frame"}
    assert jobs.ran < 60


def test_neighbours_that_fail_do_not_end_it() -> None:
    jobs = Jobs(*range(12))
    work = Isolation(run=jobs, stopping=lambda: False, unproven=True).of(messages(1000))
    assert sorted(work.failed) == [(0, offset) for offset in range(12)]
    assert work.left == {}


class Slices(Jobs):
    """Jobs of many slices, which say what was wrong with those that failed, or nothing."""

    def __init__(self, *bad: int, always: bool = False, silent: bool = False) -> None:
        super().__init__(*bad, always=always)
        self.silent, self.alone, self.tasks = silent, Jobs(*bad, always=always), 0

    def isolation(self, *, unproven: bool = False) -> Isolation:
        return Isolation(run=self.alone, slices=self.sliced, stopping=lambda: False, unproven=unproven)

    def sliced(self, parts: list[list[Reference]]) -> Sliced:
        self.ran, self.tasks = self.ran + 1, self.tasks + len(parts)
        work, broken = BatchReport(), dict[int, Exception | None]()
        for number, part in enumerate(parts):
            if self.always or any(offset in self.bad for _, offset in part):
                broken[number] = None if self.silent else raised("ValueError: no")
            else:
                work.placed.append(StagedCount(1, 1, 0, len(part), 1))
        return Sliced(work, broken)


@pytest.mark.parametrize("bad", [[0], [99_999], [5, 6], [1, 50_000, 99_000], list(range(0, 100_000, 3_500))])
def test_slices_find_the_guilty_in_a_few_jobs(bad: list[int]) -> None:
    jobs = Slices(*bad)
    work = jobs.isolation().of(messages(100_000))
    assert sorted(work.failed) == [(0, offset) for offset in bad]
    assert work.left == {}
    assert sum(placed.messages for placed in work.placed) == 100_000 - len(bad), "every other message ran once"
    assert jobs.ran <= 6
    assert jobs.alone.ran == 0


def test_two_bad_messages_of_fifty_are_alone_in_the_second_job() -> None:
    jobs = Slices(3, 40)
    assert sorted(jobs.isolation().of(messages(50)).failed) == [(0, 3), (0, 40)]
    assert jobs.ran == 2


def test_a_message_whose_slice_failed_without_a_reason_is_tried_alone() -> None:
    jobs = Slices(7, silent=True)
    assert list(jobs.isolation().of(messages(100)).failed) == [(0, 7)]
    assert jobs.alone.ran == 1
    innocent = Slices(7, silent=True)
    innocent.alone.bad = set()
    assert innocent.isolation().of(messages(100)).failed == {}


def test_a_job_of_slices_that_fails_as_a_whole_is_halved_instead() -> None:
    def hangs(parts: list[list[Reference]]) -> Sliced:
        raise TookTooLong(f"the frame over {len(parts)} parts")

    jobs = Jobs(70)
    work = Isolation(run=jobs, slices=hangs, stopping=lambda: False).of(messages(100))
    assert list(work.failed) == [(0, 70)]
    assert jobs.ran <= 15


def test_slices_charge_nobody_if_nothing_can_go_well() -> None:
    with pytest.raises(NotTheRows, match="even without messages"):
        Slices(always=True).isolation().of(messages(1000))


def test_what_the_slices_do_not_suffice_for_is_given_back() -> None:
    work = Slices(*range(0, 100_000, 100)).isolation().of(messages(100_000))
    assert work.left
    assert len(work.failed) + sum(placed.messages for placed in work.placed) < 100_000


def test_wrong_code_is_found_out_by_a_sample_of_the_batch() -> None:
    jobs = Slices(*range(100_000))
    work = jobs.isolation(unproven=True).of(messages(100_000))
    assert len(work.failed) == 13
    assert {offset // 20_000 for _, offset in work.failed} == {0, 1, 2, 3, 4}
    assert len(work.failed) + sum(map(len, work.left.values())) == 100_000
    assert jobs.ran == 2
    some = Slices(*range(90_000))
    found = some.isolation(unproven=True).of(messages(100_000))
    assert found.placed, "the code is right for a tenth of the messages"


def test_no_messages_and_a_stop_end_at_once() -> None:
    assert Isolation(run=Jobs(), stopping=lambda: False).of([]).left == {}
    assert Isolation(run=Jobs(), stopping=lambda: True).of(messages(3)).left == {0: [0, 1, 2]}


def test_a_report_bears_any_error_and_what_was_left() -> None:
    report = Report()
    report.ran(7, 3)
    report.failed(0, 5, Outcome("nack", error="half a \ud800 pair, and a \0" + "x" * 20_000), None)
    report.left(0, 6)
    report.broken(4)
    claim, work, broken = gather(pa.Table.from_batches([report.batch()]))
    assert (claim, work.ran, work.left, broken) == (7, 3, {0: [6]}, [4])
    assert len(work.failed[0, 5].error or "") == 8000


def test_references_of_another_claim_are_refused() -> None:
    """The driver asks which claim is in flight; that the batch is of this claim is known by its rows alone."""
    sinks = {"out": Sink(2, 1)}
    settled = {"ordered": True, "on_dead": "hold", "handler_timeout": None, "schema": None}
    job = Job(url="", topic="in", group="g", group_id=1, sinks=sinks, only=4, **settled)  # type: ignore[arg-type]
    rows = references(3, [(0, 7)]).to_batches()[0]
    with pytest.raises(ClaimLost, match="claim 4 is in flight"):
        list(Reader(job).read(rows))
