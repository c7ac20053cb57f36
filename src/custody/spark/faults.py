"""Whose fault a failed Spark job is: a row's, or that of what the job ran on. Only rows are ever charged.

What a message contains is part of many errors, so texts are only looked at where no message can have written them: at
the line of an exception's class, and at the words with which Spark begins the reason of a failure.
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
"""What a call raises when Spark's JVM has died."""

_OF_A_ROW = (
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    NumberFormatException,
    SparkRuntimeException,
)
# how Spark begins when the fault is not the rows': a lost executor or context, memory, disk, shuffle files
_INFRASTRUCTURE = re.compile(
    r"ExecutorLostFailure|[Ee]xecutor \S+ exited|Executor heartbeat timed out|FetchFailed|Could not obtain block"
    r"|java\.io\.IOException: No space left|java\.lang\.OutOfMemoryError"
    r"|SparkContext (was|has been) (shut ?down|stopped)"
    r"|Job \d+ cancelled|cancelled because|java\.net\.\w*Exception|All masters are unresponsive"
    r"|Could not find CoarseGrainedScheduler|is bigger than spark\.driver\.maxResultSize|Failed to connect to"
)
_REASON = re.compile(r"most recent failure: Lost task \S+ in stage \S+ \(TID \d+\)[^:]*: ?")
# code that an executor cannot import or unpickle: a function kept in __main__, a module that is only on the driver
_UNREACHED = ("AttributeError: Can't get attribute", "ModuleNotFoundError: No module named")
# what the JVM says of it: the second kind if it was just about to send the worker something
_ENDED = (
    "org.apache.spark.SparkException: Python worker exited unexpectedly",
    "java.net.SocketException: ",
    "java.io.EOFException",
    "java.io.IOException: Broken pipe",
    "java.io.IOException: Connection reset",
)
_CANCELLED = "org.apache.spark.SparkException: [SPARK_JOB_CANCELLED]"
_TRACEBACK = "Traceback (most recent call last):"
_NAMES = {f"custody.errors.{error.__name__}": error for error in by_code().values()}
_JAVA_TRACE = re.compile(r"\n\s*at [\w.$]+\(|\nDriver stacktrace|\n\tat ")
_CONTEXT = re.compile(r"\n== (DataFrame|SQL.*?) ==.*", re.DOTALL)


class NotTheRows(Exception):
    """The frame fails whatever the messages are."""


class TookTooLong(Exception):
    """A job over messages was cancelled, because it took longer than they may take."""


class TaskFailed(Exception):
    """Why an attempt of a task failed, in Spark's words."""


class SecondTry(Exception):
    """A task that failed is tried again by Spark; the batch is run in parts instead, which finds the row sooner."""


def fault(error: BaseException) -> Fault:
    """Whose fault it is that this job failed."""
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
    """The error of Custody that a task raised, from the text that Spark made of it."""
    if isinstance(error, CustodyError):
        return error
    name, _, text = (_raised(error) or "").partition(": ")
    return _NAMES[name](text.strip()) if name in _NAMES else None


def is_second_try(error: BaseException) -> bool:
    """Whether the job failed because a task was not tried again: an earlier attempt says why it had to be."""
    return (_raised(error) or "").startswith(f"{SecondTry.__module__}.{SecondTry.__qualname__}")


def decisive(attempts: Sequence[TaskFailed]) -> TaskFailed | None:
    """Of the failed attempts of a job, in their order, the one that says whose fault it is: one that was nobody's, for
    its job proves nothing of any row; else the first."""
    told = [one for one in attempts if not is_second_try(one)]
    return next((one for one in told if fault(one) != "row"), next(iter(told), None))


def worker_died(error: BaseException) -> bool:
    """Whether a Python worker ended in the middle of its task."""
    return _raised(error) is None and _reason(error).startswith(_ENDED)


def described(error: BaseException) -> str:
    """What a person wants to know of a failed job: the last error of the row's code, without Spark's own frames."""
    if isinstance(error, TookTooLong):
        return str(error)
    raised = _raised(error)
    if is_second_try(error):
        return "one of its tasks failed"
    if raised is not None:
        return raised[:2000]
    if worker_died(error):
        return "the code ended the Python process it ran in (an exit, a crash, or out of memory)"
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
    """Whether somebody has cancelled the job: we ourselves, or a person on Spark's page."""
    java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while java is not None:
        if java.toString().startswith(_CANCELLED):
            return True
        java = java.getCause()
    return False


def _raised(error: BaseException) -> str | None:
    """The line with the class and the text of what Python raised in a task: the first after the last frames."""
    text = _text(error)
    if _TRACEBACK not in text:
        return None
    for line in text[text.rindex(_TRACEBACK) :].splitlines()[1:]:
        if line and not line.startswith((" ", "\t")):
            return line.strip()
    return None


def _reason(error: BaseException) -> str:
    """Where Spark begins to say why a task failed."""
    text = _text(error)
    found = _REASON.search(text)
    return text[found.end() :] if found else text


def _text(error: BaseException) -> str:
    java = getattr(error, "java_exception", None)
    text = str(error) if java is None or isinstance(error, PySparkException) else f"{error}\n{java.toString()}"
    return text.split("\n=== Streaming Query ===")[0]
