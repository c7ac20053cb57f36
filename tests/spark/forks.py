"""Python processes of Spark, forked from one that has loaded what they load.

Spark starts `python -m …python_streaming_source_runner` for each query, and a daemon for each kind of worker: their
imports are half of what a small pipeline takes. In the session of a test process such a program hands its arguments,
environment, directory and streams to the server here (startup/sitecustomize.py), and lives as long as the process that
is forked for it: if Spark ends one, both end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "CUSTODY_TESTS_FORKS"
"""Where the server listens; for the JVM of the session alone."""
LOADED = (
    "pyspark.sql.streaming.python_streaming_source_runner",
    *(
        f"pyspark.sql.worker.{module}"
        for module in (
            "commit_data_source_write", "create_data_source", "data_source_pushdown_filters", "lookup_data_sources",
            "plan_data_source_read", "python_streaming_sink_runner", "write_into_data_source",
        )
    ),
    "pyspark.worker",
    "custody.spark.daemon",
    "custody.spark.driver.group_reader",
    "custody.spark.format.source",
)  # fmt: skip


@contextmanager
def forked() -> Iterator[str]:
    """The server, as long as the block runs: the path of its socket."""
    with (
        tempfile.TemporaryDirectory(prefix="custody-forks-") as place,
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, f"{place}/socket"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as server,
    ):
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the server of forked processes has not started"
        yield f"{place}/socket"


def serve(path: str) -> None:
    """Forks a process for each that connects, until the test process is gone, which holds our stdin open."""
    for module in LOADED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
        else:
            return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program, *arguments = become(connection)
    with warnings.catch_warnings():
        # that it is loaded already, and that a daemon forks while our thread waits
        for category in (RuntimeWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=category, message=".*(in sys.modules|multi-threaded)")
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def become(connection: socket.socket) -> list[str]:
    """Takes the place of the process at the other end, and ends with it. Returns its program and arguments."""
    text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]  # Spark says so in PYTHONUNBUFFERED
    given = json.loads(text)
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["directory"])
    sys.path[:] = [given["directory"], *given["path"]]
    for module in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[module]  # its workers have only what is on their path

    def end_with_it() -> None:
        connection.recv(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_it, daemon=True).start()
    os.register_at_fork(after_in_child=connection.close)
    program: list[str] = given["program"]
    return program


if __name__ == "__main__":
    serve(sys.argv[1])
