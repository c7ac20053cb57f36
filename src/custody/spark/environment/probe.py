"""Whether executors can do a pipeline's work, asked of each before anything is claimed for them.

Executors on other hosts have a Python, packages and a network of their own. What they lack would otherwise be found
task by task, in traces of Java, and again at every batch.
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
"""What Custody imports in executors. It comes with them itself."""
ROUNDS = 3
SETTLED = 1.0
"""Seconds without a new executor after which those that are there are asked."""
PATIENCE = 15.0
_HELD = 0.3  # a task keeps its slot so long: the others then go to other slots
_HOST = re.compile(r"Lost task \S+ in stage \S+ \(TID \d+\) \((\S+) executor \S+\): ?")
_MISMATCH = re.compile(r"PYTHON_VERSION_MISMATCH\].*?version:? (\d+\.\d+)\D.*?driver:? (\d+\.\d+)", re.DOTALL)
_NO_PYTHON = re.compile(r'Cannot run program "([^"]+)"')


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one executor says of itself."""

    host: str
    place: str
    python: tuple[int, int]
    missing: tuple[str, ...] = ()
    broken: str | None = None
    """Why Custody cannot be loaded there, though nothing is missing."""
    unreached: str | None = None
    """Why the database cannot be reached from there."""


def require_able(
    spark: SparkSession, url: str, *, stop: threading.Event, trouble: Callable[[str], None] | None = None
) -> None:
    """Refuses executors that cannot run a pipeline. Runs on the driver, before the first claim; not for local masters.

    It asks those that are there at the start. A database that the driver does not reach either is only waited for.
    """
    context = spark.sparkContext
    if runs_here(context) or not _wait_for_executors(context, stop, trouble or logger.warning):
        return
    try:
        answers = _ask(context, url)
    except (PySparkException, Py4JJavaError) as error:
        if fault(error) == "infrastructure":
            logger.debug("the executors were not asked: %s", described(error))
            return  # one was lost meanwhile, say: it will be seen with the first batch, and waited out
        raise cannot_run(error, _hosts(context)) from error
    refusal = judged(answers, url)
    if refusal is not None and not (_all_fit(answers) and unreached(url) is not None):
        raise refusal


def judged(answers: Iterable[Answer], url: str) -> PipelineRefused | None:
    """What is to be said of executors that cannot do the work; None if all can."""
    driver = sys.version_info[:2]
    for answer in answers:
        if answer.python != driver:
            return _other_python(answer.host, ".".join(map(str, answer.python)), ".".join(map(str, driver)))
        if answer.missing:
            return PipelineRefused(
                f"the executor on {answer.host} has no {', '.join(answer.missing)}",
                "Install what custody[spark] needs for the Python there (Custody itself comes by itself), or send it "
                "along: custody pipeline pack FILE --with-dependencies.",
            )
        if answer.broken is not None:
            return PipelineRefused(f"Custody cannot be loaded on {answer.host}: {answer.broken}")
    for answer in answers:
        if answer.unreached is not None and by_socket(url):
            return PipelineRefused(
                f"the executor on {answer.host} does not reach the database's socket: workers on other hosts need a "
                f"TCP database URL ({answer.unreached})",
                "The embedded PostgreSQL has no TCP. Name a server that every host reaches: "
                "CUSTODY_DATABASE=postgresql://user@host/database.",
            )
        if answer.unreached is not None:
            return PipelineRefused(
                f"the executor on {answer.host} does not reach the database, as this driver does: {answer.unreached}",
                "Use a host name that is known there, and let it in (firewall, pg_hba.conf, ~/.pgpass on that host).",
            )
    return None


def cannot_run(error: BaseException, hosts: Iterable[str]) -> PipelineRefused:
    """What is to be said when not even a small function can be run. Spark does not always tell where it was."""
    text = str(error)
    found = _HOST.search(text)
    host = f"one of {', '.join(sorted(set(hosts)))}" if found is None else found[1]
    mismatch, no_python = _MISMATCH.search(text), _NO_PYTHON.search(text)
    if mismatch is not None:
        return _other_python(host, mismatch[1], mismatch[2])
    if no_python is not None:
        return PipelineRefused(
            f"there is no Python {no_python[1]!r} on {host}",
            "Set PYSPARK_PYTHON to one that every worker has, with the packages that custody[spark] needs.",
        )
    return PipelineRefused(f"Python does not run on {host}: {described(error)}")


def _other_python(host: str, theirs: str, ours: str) -> PipelineRefused:
    return PipelineRefused(
        f"the executor on {host} runs Python {theirs}, and this driver {ours}: functions do not travel between them",
        f"Set PYSPARK_PYTHON to a Python {ours} that every worker has.",
    )


def _all_fit(answers: Iterable[Answer]) -> bool:
    """Whether the database is all that they lack."""
    return not any(one.missing or one.broken or one.python != sys.version_info[:2] for one in answers)


def _wait_for_executors(context: SparkContext, stop: threading.Event, trouble: Callable[[str], None]) -> bool:
    """Until there are some, and no more come; False if it is stopped before. Spark itself would wait in silence.

    With dynamic allocation there are none before there is work: the question itself brings them.
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
            trouble("the cluster has given no executor yet: are its workers up, with enough free cores and memory?")
            said = True
        if stop.wait(0.05):
            return False


def _executors(context: SparkContext) -> int:
    return len(_hosts(context))


def _hosts(context: SparkContext) -> list[str]:
    """The host of each executor that is registered. Spark counts the driver as one too."""
    listed = context._jsc.sc().statusStore().executorList(True)
    found = [listed.apply(number) for number in range(listed.size())]
    return [one.hostPort().rpartition(":")[0] for one in found if one.id() != "driver"]


def _slots(context: SparkContext) -> int:
    """How many tasks run at once."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def _ask(context: SparkContext, url: str) -> list[Answer]:
    """The answer of each executor that there is. A task for each slot; once more if one of them was busy."""
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
    """Runs in an executor, and travels by value: nothing but Python itself is known to be there."""
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
