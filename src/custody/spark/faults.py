"""Classifies a failed Spark job: a row, the infrastructure or the pipeline is at fault. Only a row's failure counts.

Many errors contain text of a message. So only text that no message can influence is matched: the line with the class of
an exception, and the beginning of Spark's reason for a failure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from py4j.protocol import Py4JNetworkError
from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    NumberFormatException,
    ParseException,
    PySparkException,
    SparkRuntimeException,
)

from custody.errors import CustodyError, by_code

Fault = Literal["row", "infrastructure", "pipeline"]
GONE = (Py4JNetworkError, ConnectionError)
"""Exceptions of a call when Spark's JVM has died."""

_OF_A_ROW = (
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    NumberFormatException,
    SparkRuntimeException,
)
# beginnings of Spark's reasons that are no row's fault: a lost executor or context, memory, disk, shuffle files
_INFRASTRUCTURE = re.compile(
    r"ExecutorLostFailure|[Ee]xecutor \S+ exited|Executor heartbeat timed out|FetchFailed|Could not obtain block"
    r"|java\.io\.IOException: No space left|java\.lang\.OutOfMemoryError"
    r"|SparkContext (was|has been) (shut ?down|stopped)"
    r"|Job \d+ cancelled|cancelled because|java\.net\.\w*Exception|All masters are unresponsive"
    r"|Could not find CoarseGrainedScheduler|is bigger than spark\.driver\.maxResultSize|Failed to connect to"
)
_REASON = re.compile(r"most recent failure: Lost task \S+ in stage \S+ \(TID \d+\)[^:]*: ?")
# code that an executor cannot import or unpickle: a function of __main__, a module that only the driver has
_UNREACHED = ("AttributeError: Can't get attribute", "ModuleNotFoundError: No module named")
# how the JVM reports a dead Python worker; all but the first if it was writing to the worker at that moment
_ENDED = (
    "org.apache.spark.SparkException: Python worker exited unexpectedly",
    "java.net.SocketException: ",
    "java.io.EOFException",
    "java.io.IOException: Broken pipe",
    "java.io.IOException: Connection reset",
)
_CANCELLED = "org.apache.spark.SparkException: [SPARK_JOB_CANCELLED]"
_TEXT = "_custody_text"  # attribute of an error: Spark takes long to say what a Java exception is
_TRACEBACK = "Traceback (most recent call last):"
_NAMES = {f"custody.errors.{error.__name__}": error for error in by_code().values()}
_JAVA_TRACE = re.compile(r"\n\s*at [\w.$]+\(|\nDriver stacktrace|\n\tat ")
_CONTEXT = re.compile(r"\n== (DataFrame|SQL.*?) ==.*", re.DOTALL)


class NotTheRows(Exception):
    """The frame fails even without messages."""


class TookTooLong(Exception):
    """A job was cancelled because it took longer than its messages may take."""


class TaskFailed(Exception):
    """Spark's reason why an attempt of a task failed."""


class SecondTry(Exception):
    """Refuses Spark's retry of a failed task. The batch is run in parts instead, which finds the row sooner."""


def fault(error: BaseException) -> Fault:
    """What is at fault for the failure of this job."""
    if isinstance(error, AnalysisException | ParseException):
        return "pipeline"
    if isinstance(error, TookTooLong):
        return "row"
    if isinstance(error, CustodyError | NotTheRows) or ours(error) is not None or _cancelled(error):
        return "infrastructure"
    raised = _raised(error)
    if raised is not None:
        return "pipeline" if raised.startswith(_UNREACHED) else "row"
    if isinstance(error, _OF_A_ROW) or not _INFRASTRUCTURE.match(_reason(error)):
        return "row"
    return "infrastructure"


def ours(error: BaseException) -> CustodyError | None:
    """Custody's own error that a task raised, recovered from Spark's text."""
    if isinstance(error, CustodyError):
        return error
    name, _, text = (_raised(error) or "").partition(": ")
    return _NAMES[name](text.strip()) if name in _NAMES else None


def is_second_try(error: BaseException) -> bool:
    """Whether the job failed because a retry was refused. The reason is in an earlier attempt."""
    return (_raised(error) or "").startswith(f"{SecondTry.__module__}.{SecondTry.__qualname__}")


def decisive(attempts: Sequence[TaskFailed]) -> TaskFailed | None:
    """The attempt that decides what is at fault, of a job's failed attempts in their order.

    It is the first that is not a row's fault, because such a job proves nothing about any row; else the first.
    """
    told = [one for one in attempts if not is_second_try(one)]
    return next((one for one in told if fault(one) != "row"), next(iter(told), None))


def worker_died(error: BaseException) -> bool:
    """Whether a Python worker died during its task."""
    return _raised(error) is None and _reason(error).startswith(_ENDED)


def described(error: BaseException) -> str:
    """The error of a failed job for people: the last error of the user's code, without Spark's stack frames."""
    if isinstance(error, TookTooLong):
        return str(error)
    raised = _raised(error)
    if is_second_try(error):
        return "one of its tasks failed"
    if raised is not None:
        return raised[:2000]
    if worker_died(error):
        return "the code ended its Python process (an exit, a crash, or out of memory)"
    text = _CONTEXT.sub("", _text(error))
    condition = re.search(r"\[[A-Z0-9_.]+\] .*", text)
    if condition:
        found = condition[0]
    elif _REASON.search(text):
        found = _reason(error)
    else:
        found = text.rpartition("\nCaused by: ")[2]
    return _JAVA_TRACE.split(found)[0].strip()[:2000]


def _cancelled(error: BaseException) -> bool:
    """Whether the job was cancelled, by us or by a user of Spark's web UI."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while java is not None:
        if java.toString().startswith(_CANCELLED):
            return True
        java = java.getCause()
    return False


def _raised(error: BaseException) -> str | None:
    """The class and text of the exception that Python raised in a task: the first line after the last stack frames."""
    text = _text(error)
    if _TRACEBACK not in text:
        return None
    for line in text[text.rindex(_TRACEBACK) :].splitlines()[1:]:
        if line and not line.startswith((" ", "\t")):
            return line.strip()
    return None


def _reason(error: BaseException) -> str:
    """Spark's reason why a task failed, and what follows it."""
    text = _text(error)
    found = _REASON.search(text)
    return text[found.end() :] if found else text


def _text(error: BaseException) -> str:
    known: str | None = getattr(error, _TEXT, None)
    if known is not None:
        return known
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None or isinstance(error, PySparkException) else f"{error}\n{java.toString()}"
    text = text.split("\n=== Streaming Query ===")[0]
    setattr(error, _TEXT, text)
    return text
