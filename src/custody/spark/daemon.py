"""Spark's Python daemon, with what tasks of a pipeline load already loaded: a worker is then forked in no time.

Spark starts it in place of its own (`spark.python.daemon.module`) where executors run in the driver's installation.
Otherwise every new worker, and each that replaces one that a handler has killed, spends most of a second on imports.
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
    """Spark's own, but for the traceback when a failed task has left its pipe: the failure is reported without it.

    It ends with the daemon even if a handler blocks signals: at the end of Spark the daemon sends one, and is gone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        return int(_worker(*arguments))
    except BrokenPipeError:
        return 1


if __name__ == "__main__":
    # a task makes many short-lived objects and no cycles: the collector would look through them again and again
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    daemon.worker = worker  # type: ignore[assignment]  # what the daemon calls in each process that it forks
    daemon.manager()
