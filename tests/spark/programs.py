"""Programs of Spark's own, run as processes: on loopback, with this Python and the Java that Custody finds."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark
from tests import jvm
from tests.waiting import wait_for

from custody.spark.environment import java

PAGE = Path(__file__).parents[2] / "docs" / "spark-sessions.md"
BIN = Path(pyspark.__file__).parent / "bin"
SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
QUICK = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.python.daemon.module": "custody.spark.daemon",
}
"""What saves time in a test, and changes no result."""


def documented(name: str) -> str:
    """The file of that name, as the page shows it."""
    found = re.search(rf"^```\w+ {re.escape(name)}\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def environment(**more: str) -> dict[str, str]:
    """What a user's shell has who works in an environment with Custody in it; no setting of this process's Spark."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SPARK", "PYSPARK", "JAVA", "CUSTODY")) and name != "PYTHONWARNINGS"
    }
    ours = {"JAVA_HOME": str(java.find().home), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    return {**kept, **jvm.variables(), **ours, **more}


def settings(more: Mapping[str, str]) -> list[str]:
    """As arguments of Spark's programs."""
    return [part for name, value in {**QUICK, **more}.items() for part in ("--conf", f"{name}={value}")]


def finish(command: Sequence[str | Path], directory: Path, known: Mapping[str, str]) -> tuple[int, str]:
    """Runs it to its end: its exit code, and all that it said. Its children end with it, whatever happens."""
    with subprocess.Popen(
        command, cwd=directory, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=200)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, said


@contextmanager
def connect_server(directory: Path, database: str, more: Mapping[str, str]) -> Iterator[str]:
    """A Connect server in a process of its own, which knows the database; its address."""
    port = _free_port()
    here = {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port)}
    command = [BIN / "spark-submit", "--class", SERVER, "--master", "local[2,4]", *settings({**here, **more})]
    with (directory / "server.log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=environment(CUSTODY_DATABASE=database),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: _answers(process, port), "the Connect server does not answer", timeout=90)
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    assert process.poll() is None, "the Connect server has ended"
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
