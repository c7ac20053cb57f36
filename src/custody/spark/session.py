"""The Spark session of this process: the active one, or a new one with little logging and settings for pipelines."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from custody import extras
from custody.errors import InvalidArgument, InvalidConfig, did_you_mean
from custody.spark.environment import installed, java

with extras.named():
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    from custody.spark.environment.own_session import require_classic

MASTER = "local[*,4]"  # with plain local[*] Spark does not retry tasks
LOG_LEVELS = ["off", "fatal", "error", "warn", "info", "debug", "trace", "all"]
_JVM_OPTIONS = "spark.driver.extraJavaOptions"
_LOOPBACK = "127.0.0.1"


def session(
    *, master: str | None = None, app_name: str = "custody", config: Mapping[str, str] | None = None
) -> SparkSession:
    """Runs on the driver. `app_name` and `config` are for a new session; an active one is returned unchanged.

    Under spark-submit, its settings override the defaults here, and the arguments override both.
    """
    require_classic()
    context = SparkContext._active_spark_context
    if context is not None:
        if master is not None and master != context.master:
            raise InvalidArgument(
                f"Spark already runs here with the master {context.master!r}, not {master!r}",
                "Stop that session first, or leave out the master.",
            )
        return SparkSession.getActiveSession() or SparkSession.builder.getOrCreate()
    _check_log_level()
    _quiet_python()
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    told = _told_to_submit() if submitted else {}
    config = config or {}
    chosen = master or config.get("spark.master") or told.get("spark.master", MASTER)
    defaults = {key: value for key, value in _defaults(chosen, app_name).items() if key not in told}
    settings = {**defaults, **config, "spark.master": chosen}
    if not submitted:
        settings[_JVM_OPTIONS] = f"{_quiet()} {settings.get(_JVM_OPTIONS, '')}".strip()
        if SparkContext._gateway is None:
            os.environ["JAVA_HOME"] = str(java.find().home)
    # otherwise workers run the `python3` of their PATH, without this environment's packages
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if not _is_local(chosen):
        return SparkSession.builder.config(map={**settings}).getOrCreate()
    with _on_loopback(), installed.preferred():
        return SparkSession.builder.config(map={**settings}).getOrCreate()


def _defaults(master: str, app_name: str) -> dict[str, str]:
    settings = {
        "spark.app.name": app_name,
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.python.worker.reuse": "true",
    }
    if _is_local(master):
        settings |= {
            "spark.driver.host": _LOOPBACK,
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.sql.shuffle.partitions": str(_cores(master)),
            "spark.python.daemon.module": "custody.spark.daemon",
        }
    return settings


def _is_local(master: str) -> bool:
    return master.startswith("local")


def _cores(master: str) -> int:
    """Number of tasks that a local master runs at once."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cluster = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master)
    if cluster is not None:
        return int(cluster[1]) * int(cluster[2])
    threads = re.fullmatch(r"local\[\s*(\*|\d+)\s*(?:,.*)?\]", master)
    if threads is None:
        return 1
    return here if threads[1] == "*" else int(threads[1])


def _quiet() -> str:
    """The JVM option with the path of the log configuration, as a URL: Spark would split a path at blanks."""
    return f"-Dlog4j2.configurationFile={Path(__file__).with_name('log4j2.properties').as_uri()}"


def _quiet_python() -> None:
    """Silences PySpark, which logs every failed query with its Java stack to stderr and raises it as well."""
    if not os.environ.get("CUSTODY_SPARK_LOG"):
        for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
            logging.getLogger(name).disabled = True


def _check_log_level() -> None:
    level = os.environ.get("CUSTODY_SPARK_LOG", "")
    if level and level.lower() not in LOG_LEVELS:
        known = did_you_mean(level.lower(), LOG_LEVELS)
        raise InvalidConfig(f"CUSTODY_SPARK_LOG is {level!r}, which is not a log level", known)


def _told_to_submit() -> dict[str, str]:
    """Settings that spark-submit got as flags or from its defaults file; its JVM runs already."""
    SparkContext._ensure_initialized()
    return dict(SparkConf().getAll())


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Binds Spark's web UI to the loopback; only this variable does. Otherwise it is open to the network.

    The variable is restored once the JVM has it, because a later child process may be the driver of a real cluster.
    """
    given = os.environ.get("SPARK_LOCAL_IP")
    os.environ["SPARK_LOCAL_IP"] = given or _LOOPBACK
    try:
        yield
    finally:
        if given is None:
            del os.environ["SPARK_LOCAL_IP"]
