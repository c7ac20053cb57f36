"""One Spark for all tests of a test process: starting a JVM takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext
from pyspark.sql import SparkSession
from tests.spark import forks

from custody.spark.session import session


@contextmanager
def local_spark() -> Iterator[SparkSession]:
    """A small local Spark that tries a task up to four times, as pipelines do."""
    with forks.forked() as path:
        os.environ[forks.VARIABLE] = path
        opened = session(
            master="local[2,4]",
            app_name="custody-tests",
            config={
                "spark.sql.shuffle.partitions": "2",
                "spark.ui.enabled": "false",
                "spark.driver.memory": "1g",
            },
        )
        del os.environ[forks.VARIABLE]  # the JVM has it
        yield opened
        opened.stop()
        end_jvm()
        # The JVM removes the files of the session, but not from the path: the next import would look for them there.
        sys.path[:] = [place for place in sys.path if "/userFiles-" not in place]


def end_jvm() -> None:
    """Spark's stop() leaves the JVM running until Python ends. This waits for its end, and allows another one."""
    gateway = SparkContext._gateway
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM watches it
    gateway.proc.wait(timeout=250)  # it may be writing an archive of its classes
    SparkContext._gateway = SparkContext._jvm = None
