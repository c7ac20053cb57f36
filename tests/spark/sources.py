"""Processes of Spark's streaming sources, forked from one that has loaded what they load.

Spark starts `python -m …python_streaming_source_runner` for each query, and its imports are half of what a small
pipeline takes. In the session of a test process that program hands its environment, directory and streams to the server
here (startup/sitecustomize.py), and lives as long as the process that is forked for it: if Spark ends one, both end.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "CUSTODY_TESTS_SOURCES"
"""Where the server listens; for the JVM of the session alone."""


@contextmanager
def forked() -> Iterator[str]:
    """The server, as long as the block runs: the path of its socket."""
    with (
        tempfile.TemporaryDirectory(prefix="custody-sources-") as place,
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, f"{place}/socket"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        ) as server,
    ):
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the server of the sources has not started"
        yield f"{place}/socket"


def serve(path: str) -> None:
    """Forks a process for each that connects, until the test process is gone, which holds our stdin open."""
    import pyspark.sql.streaming.python_streaming_source_runner

    import custody.spark.driver.group_reader
    import custody.spark.format.source  # noqa: F401

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
    become(connection)
    with pyspark.sql.streaming.python_streaming_source_runner.get_sock_file_to_executor(timeout=None) as file:
        pyspark.sql.streaming.python_streaming_source_runner.main(file, file)


def become(connection: socket.socket) -> None:
    """Takes the place of the process at the other end, and ends with it."""
    text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(1 << 20)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    given = json.loads(text)
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["directory"])

    def end_with_it() -> None:
        connection.recv(1)
        os._exit(1)

    threading.Thread(target=end_with_it, daemon=True).start()


if __name__ == "__main__":
    serve(sys.argv[1])
