"""Checks on each executor that it can run a pipeline, before anything is claimed.

Executors on other hosts have their own Python, packages and network. Without this check, every batch would show what
they lack as a Java stack trace of some task.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark import SparkContext, cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from custody.errors import PipelineRefused
from custody.spark.database.reach import by_socket, unreached
from custody.spark.environment.shipping import runs_here
from custody.spark.faults import described, fault

logger = logging.getLogger(__name__)

PACKAGES = (
    "adbc_driver_manager",
    "adbc_driver_postgresql",
    "msgspec",
    "pandas",
    "psycopg",
    "psycopg_pool",
    "pyarrow",
    "yaml",
)
"""Packages that Custody imports in executors. Custody itself is shipped to them."""
ROUNDS = 3
SETTLED = 1.0
"""Seconds without a new executor after which the present ones are checked."""
PATIENCE = 15.0
_HELD = 0.3  # seconds that a task keeps its slot, so that the other tasks get other slots
_HOST = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \((\S+) executor \S+\): ?")
_MISMATCH = re.compile(r"PYTHON_VERSION_MISMATCH\].*?version:? (\d+\.\d+)\D.*?driver:? (\d+\.\d+)", re.DOTALL)
_NO_PYTHON = re.compile(r'Cannot run program "([^"]+)"')


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of one executor."""

    host: str
    place: str
    python: tuple[int, int]
    missing: tuple[str, ...] = ()
    broken: str | None = None
    """Why Custody cannot be imported there although no package is missing."""
    unreached: str | None = None
    """Why the database cannot be reached from there."""


def require_able(
    spark: SparkSession, url: str, *, stop: threading.Event, trouble: Callable[[str], None] | None = None
) -> None:
    """Refuses executors that cannot run a pipeline. Runs on the driver, before the first claim; not for local masters.

    It checks the executors present at the start. If the driver cannot reach the database either, it waits for it.
    """
    context = spark.sparkContext
    if runs_here(context) or not _wait_for_executors(context, stop, trouble or logger.warning):
        return
    try:
        answers = _ask(context, url)
    except (PySparkException, Py4JJavaError) as error:
        if fault(error) == "infrastructure":
            logger.debug("the executors were not checked: %s", described(error))
            return  # for example, one was lost meanwhile; the first batch will show it and retry
        raise cannot_run(error, _hosts(context)) from error
    refusal = judged(answers, url)
    if refusal is not None and not (_all_fit(answers) and unreached(url) is not None):
        raise refusal


def judged(answers: Iterable[Answer], url: str) -> PipelineRefused | None:
    """The refusal for executors that cannot run a pipeline; None if all can."""
    driver = sys.version_info[:2]
    for answer in answers:
        if answer.python != driver:
            return _other_python(answer.host, ".".join(map(str, answer.python)), ".".join(map(str, driver)))
        if answer.missing:
            return PipelineRefused(
                f"the executor on {answer.host} has no {', '.join(answer.missing)}",
                "Install the dependencies of custody[spark] in the Python there (Custody itself is shipped), or ship "
                "them too: custody pipeline pack FILE --with-dependencies.",
            )
        if answer.broken is not None:
            return PipelineRefused(f"Custody cannot be imported on {answer.host}: {answer.broken}")
    for answer in answers:
        if answer.unreached is not None and by_socket(url):
            return PipelineRefused(
                f"the executor on {answer.host} cannot reach the database's Unix socket: workers on other hosts need a "
                f"TCP database URL ({answer.unreached})",
                "The embedded PostgreSQL does not listen on TCP. Use a server that every host can reach: "
                "CUSTODY_DATABASE=postgresql://user@host/database.",
            )
        if answer.unreached is not None:
            return PipelineRefused(
                f"the executor on {answer.host} cannot reach the database, but this driver can: {answer.unreached}",
                "Use a host name that resolves there, and allow access (firewall, pg_hba.conf, ~/.pgpass on the host).",
            )
    return None


def cannot_run(error: BaseException, hosts: Iterable[str]) -> PipelineRefused:
    """The refusal if not even a small function runs. Spark does not always name the host."""
    text = str(error)
    found = _HOST.search(text)
    host = f"one of {', '.join(sorted(set(hosts)))}" if found is None else found[1]
    mismatch, no_python = _MISMATCH.search(text), _NO_PYTHON.search(text)
    if mismatch is not None:
        return _other_python(host, mismatch[1], mismatch[2])
    if no_python is not None:
        return PipelineRefused(
            f"there is no Python {no_python[1]!r} on {host}",
            "Set PYSPARK_PYTHON to one that every worker has, with the dependencies of custody[spark].",
        )
    return PipelineRefused(f"Python does not run on {host}: {described(error)}")


def _other_python(host: str, theirs: str, ours: str) -> PipelineRefused:
    return PipelineRefused(
        f"the executor on {host} runs Python {theirs}, but this driver {ours}: pickled functions are not compatible",
        f"Set PYSPARK_PYTHON to a Python {ours} that every worker has.",
    )


def _all_fit(answers: Iterable[Answer]) -> bool:
    """Whether they lack nothing but the database."""
    return not any(one.missing or one.broken or one.python != sys.version_info[:2] for one in answers)


def _wait_for_executors(context: SparkContext, stop: threading.Event, trouble: Callable[[str], None]) -> bool:
    """Waits until there are executors and no more register; False if it is stopped before. Spark would wait silently.

    With dynamic allocation there are none before there is work; the check itself is such work.
    """
    if context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true":
        return not stop.is_set()
    known, since, begun, said = 0, time.monotonic(), time.monotonic(), False
    while True:
        count, now = _executors(context), time.monotonic()
        if count != known:
            known, since = count, now
        if known and now - since >= SETTLED:
            return True
        if not known and not said and now - begun > PATIENCE:
            trouble(
                "the cluster has provided no executor yet: are its workers running, with enough free cores and memory?"
            )
            said = True
        if stop.wait(0.05):
            return False


def _executors(context: SparkContext) -> int:
    return len(_hosts(context))


def _hosts(context: SparkContext) -> list[str]:
    """The host of each registered executor. Spark's own list includes the driver."""
    listed = context._jsc.sc().statusStore().executorList(True)
    found = [listed.apply(number) for number in range(listed.size())]
    return [one.hostPort().rpartition(":")[0] for one in found if one.id() != "driver"]


def _slots(context: SparkContext) -> int:
    """Number of tasks that run at once."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def _ask(context: SparkContext, url: str) -> list[Answer]:
    """The answer of each executor, from a task for each slot; repeated if an executor was busy."""
    found: dict[str, Answer] = {}
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # there may be no Custody yet
    try:
        for _ in range(ROUNDS):
            slots = max(_slots(context), _executors(context), 1)
            task = functools.partial(_answer, url=url, packages=PACKAGES, held=_HELD)
            said = context.parallelize(range(slots), slots).mapPartitions(task).collect()
            answers = [Answer(**one) for one in said]
            found |= {answer.place: answer for answer in answers}
            if len(found) >= _executors(context):
                break
    finally:
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return sorted(found.values(), key=lambda answer: answer.host)


def _answer(_: Iterable[int], *, url: str, packages: Iterable[str], held: float) -> Iterator[dict[str, Any]]:
    """Runs in an executor. It is pickled by value, because only Python itself is known to be there."""
    import importlib
    import os
    import socket
    import sys
    import time

    begun = time.monotonic()
    host = os.environ.get("SPARK_LOCAL_IP") or os.environ.get("SPARK_LOCAL_HOSTNAME") or socket.gethostname()
    missing, broken, unreached = [], None, None
    for name in packages:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            missing.append(name)
        except Exception as error:
            broken = f"{name}: {type(error).__name__}: {error}"
    if not missing and broken is None:
        try:
            importlib.import_module("custody.spark.database.tasks")
            reach = importlib.import_module("custody.spark.database.reach")
        except Exception as error:
            broken = f"{type(error).__name__}: {error}"
        else:
            unreached = reach.unreached(url)
    time.sleep(max(0.0, held - (time.monotonic() - begun)))
    yield {
        "host": host,
        "place": f"{host}:{os.getcwd()}",
        "python": tuple(sys.version_info[:2]),
        "missing": tuple(missing),
        "broken": broken,
        "unreached": unreached,
    }
