"""Handlers and frames that hang: they are stopped from outside, their message alone is charged, and a stop is soon."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from tests.waiting import wait_for

import custody
from custody.spark import Pipeline
from custody.spark.driver import watching
from custody.spark.faults import fault
from custody.spark.tasks.each import HUNG, TOO_LONG

pytestmark = [pytest.mark.req("X5"), pytest.mark.timeout(300)]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.fixture
def c(database_url: str) -> Iterator[custody.Custody]:
    with custody.connect(database_url, worker="test") as opened:
        opened.create_topic("in", partitions=2)
        opened.create_topic("out", partitions=2)
        yield opened


def publish(c: custody.Custody, count: int) -> None:
    c.publish_many("in", [custody.Outgoing({"n": n}, key=f"k{n % 7}") for n in range(count)])


def numbers(c: custody.Custody) -> list[int]:
    return sorted(message.payload["n"] for p in range(2) for message in c.read("out", p, max_messages=1000))


def hang() -> None:
    """In C code that holds the interpreter, with every signal blocked: nothing within the process ends this."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(100_000)


def policy(timeout: str | None, max_attempts: int = 1) -> custody.Policy:
    backoff = custody.Constant("20ms")
    return custody.Policy(ordering="key", max_attempts=max_attempts, backoff=backoff, handler_timeout=timeout)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.chaos
def test_a_handler_that_hangs_is_killed_and_its_message_alone_is_charged(
    c: custody.Custody, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "SILENCE", 2.0)
    publish(c, 200)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=policy("3s", max_attempts=2))

    @pipeline.each
    def screen(message: custody.Message) -> object:
        if message.payload["n"] == 50 and message.attempt == 1:
            hang()
        if message.payload["n"] == 100:
            time.sleep(100_000)
        return message.payload

    said: list[str] = []
    summary = pipeline.run(c, spark=spark, drain="60s", batch_time="10m", on_trouble=said.append)
    (letter,) = c.dead("in", "g")
    assert (letter.payload, letter.attempts, letter.errors) == (
        {"n": 100},
        2,
        (f"attempt 1: TimeoutError: {TOO_LONG}", f"attempt 2: TimeoutError: {TOO_LONG}"),
    )
    assert numbers(c) == [n for n in range(200) if n != 100]
    assert summary.failed == 3, "no other message was charged"
    hung = next(m for p in range(2) for m in c.read("in", p, max_messages=1000) if m.payload["n"] == 50)
    assert [entry.error for entry in c.trace("in", hung.partition, hung.offset, group="g") if entry.error] == [HUNG]
    where = f"the handler screen has been running for .* s on partition {hung.partition}, offset {hung.offset}"
    assert any(re.search(where, line) for line in said), said


@pytest.mark.chaos
def test_a_frame_that_hangs_is_cancelled_and_its_row_is_found(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, 4)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=policy("2s"), schema="n int")

    @pipeline.frame
    def transform(frame: DataFrame) -> DataFrame:
        @F.udf("int", useArrow=False)
        def hangs(n):  # type: ignore[no-untyped-def]
            if n == 2:
                hang()
            return n

        return frame.withColumn("n", hangs("n"))

    said: list[str] = []
    summary = pipeline.run(c, spark=spark, drain="120s", batch_time="10m", on_trouble=said.append)
    (letter,) = c.dead("in", "g")
    assert letter.payload == {"n": 2}
    assert "took longer than 2 s" in (letter.last_error or "")
    assert numbers(c) == [0, 1, 3]
    assert summary.failed == 1, "no other message was charged"


@pytest.mark.chaos
def test_a_stop_cancels_a_task_that_hangs_and_charges_nothing(
    c: custody.Custody, spark: SparkSession, tmp_path: Path
) -> None:
    publish(c, 20)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=policy(None))

    @pipeline.each
    def hangs(message: custody.Message) -> object:
        if message.payload["n"] == 5:
            (tmp_path / "pid.tmp").write_text(str(os.getpid()))
            (tmp_path / "pid.tmp").rename(tmp_path / "pid")
            hang()
        return message.payload

    def stop() -> None:
        wait_for((tmp_path / "pid").exists, "the handler was not called", timeout=60)
        stopped_at.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    stopped_at: list[float] = []
    stopper = threading.Thread(target=stop)
    stopper.start()
    summary = pipeline.run(c, spark=spark, grace="500ms")
    took = time.monotonic() - stopped_at[0]
    stopper.join()
    assert took < 20, "a task that hangs kept the pipeline from stopping"
    assert (summary.failed, summary.left.lag + summary.left.waiting, summary.left.dead) == (0, 20, 0)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not alive(pid), "the Python process is still there")


@pytest.mark.chaos
def test_a_second_signal_waits_for_nothing(c: custody.Custody, spark: SparkSession, tmp_path: Path) -> None:
    publish(c, 20)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=policy(None))

    @pipeline.each
    def hangs(message: custody.Message) -> object:
        (tmp_path / str(os.getpid())).touch()
        hang()
        return message.payload

    stop = threading.Event()
    times: list[float] = []

    def interrupt_twice() -> None:
        wait_for(lambda: any(tmp_path.iterdir()), "the handler was not called", timeout=60)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(stop.is_set, "the first signal did not ask for a stop")
        times.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_twice).start()
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(c, spark=spark, grace="1h", stop=stop)
    assert time.monotonic() - times[0] < 10
    pids = [int(path.name) for path in tmp_path.iterdir()]
    wait_for(lambda: not any(map(alive, pids)), "a Python process is still there")


@pytest.mark.chaos
def test_a_trial_ends_too(c: custody.Custody, spark: SparkSession) -> None:
    publish(c, 3)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=policy("1s"))

    @pipeline.each
    def hangs(message: custody.Message) -> object:
        if message.payload["n"] == 1:
            hang()
        return message.payload

    trials = {trial.message.payload["n"]: trial for trial in pipeline.try_out(c, spark=spark)}
    assert [trials[n].outcome for n in range(3)] == ["ack", "nack", "ack"]
    assert "took longer than" in (trials[1].error or "")


@pytest.mark.chaos
def test_a_frame_that_is_stopped_is_not_divided(c: custody.Custody, spark: SparkSession, tmp_path: Path) -> None:
    publish(c, 4)
    pipeline = Pipeline(source="in", group="g", sink="out", policy=policy(None), schema="n int")

    @pipeline.frame
    def transform(frame: DataFrame) -> DataFrame:
        @F.udf("int", useArrow=False)
        def hangs(n):  # type: ignore[no-untyped-def]
            (tmp_path / "begun").touch()
            hang()

        return frame.withColumn("n", hangs("n"))

    stop = threading.Event()
    said: list[str] = []

    def stop_soon() -> None:
        wait_for((tmp_path / "begun").exists, "the frame was not run", timeout=60)
        stop.set()

    threading.Thread(target=stop_soon).start()
    summary = pipeline.run(c, spark=spark, grace="500ms", stop=stop, on_trouble=said.append)
    assert (summary.batches, summary.failed) == (0, 0)
    assert [line for line in said if "running it in parts" in line] == []


def test_a_job_that_somebody_cancels_is_no_rows_fault(spark: SparkSession, tmp_path: Path) -> None:
    @F.udf("int", useArrow=False)
    def waits(n):  # type: ignore[no-untyped-def]
        (tmp_path / "begun").touch()
        time.sleep(100)

    def cancel() -> None:
        wait_for((tmp_path / "begun").exists, "the job was not run", timeout=60)
        spark.sparkContext.cancelAllJobs()

    threading.Thread(target=cancel).start()
    with pytest.raises(Exception, match="cancel") as caught:
        spark.range(1).select(waits("id")).toArrow()
    assert fault(caught.value) == "infrastructure"
