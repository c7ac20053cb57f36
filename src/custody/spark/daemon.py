"""Spark's Python daemon with the modules of a pipeline's tasks preloaded, so that forking a worker is fast.

Spark starts it instead of its own (`spark.python.daemon.module`) where executors use the driver's installation.
Otherwise every new worker, also one that replaces a killed one, would spend most of a second on imports.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
from typing import Any

import adbc_driver_postgresql.dbapi  # noqa: F401
import pandas  # noqa: F401
import pyspark.sql.pandas.serializers
import pyspark.worker  # noqa: F401
from pyspark import daemon

import custody.spark.tasks.each
import custody.spark.tasks.frame  # noqa: F401

_worker = daemon.worker


_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def worker(*arguments: Any) -> int:
    """Spark's worker, without the traceback about a closed pipe after a failed task: the failure is reported anyway.

    It ends with the daemon even if a handler blocks signals: when Spark ends, the daemon only sends one and exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        return int(_worker(*arguments))
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    # a task creates many short-lived objects and no cycles, so the garbage collector would scan them in vain
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    daemon.worker = worker  # type: ignore[assignment]  # what the daemon calls in each process that it forks
    daemon.manager()
