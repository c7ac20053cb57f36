"""Runs at the start of each Python that a test starts, because tests/jvm.py puts this directory on PYTHONPATH.

A source or a daemon of the session that tests share goes on in a process that tests/spark/forks.py forks.
"""

import os
import sys


def _hand_over(path: str, program: list[str]) -> None:
    import json
    import socket

    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        given = {"program": program, "environment": dict(os.environ), "directory": os.getcwd(), "path": sys.path}
        socket.send_fds(connection, [json.dumps(given).encode() + b"\n"], [0, 1, 2])
        connection.recv(1)  # until it has ended
    os._exit(0)


_program = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else [""]
if _program[0].endswith((".python_streaming_source_runner", "spark.daemon")) and "CUSTODY_TESTS_FORKS" in os.environ:
    _hand_over(os.environ["CUSTODY_TESTS_FORKS"], _program)
