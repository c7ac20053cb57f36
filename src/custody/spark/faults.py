"""Whose fault a failed Spark job is: a row's, or that of what the job ran on. Only rows are ever charged."""

from __future__ import annotations

import re
from typing import Literal

from pyspark.errors import AnalysisException, ParseException, PySparkException

from custody.errors import CustodyError, by_code

Fault = Literal["row", "infrastructure", "pipeline"]

# what executors say when the fault is not the rows': a lost executor or context, memory, disk, shuffle files
_INFRASTRUCTURE = re.compile(
    r"ExecutorLostFailure|executor \S+ exited|Executor heartbeat timed out|FetchFailed|shuffle block"
    r"|Could not obtain block|No space left on device|OutOfMemoryError|SparkContext (was|has been) (shut ?down|stopped)"
    r"|Job \d+ cancelled|cancelled because|Connection (refused|reset)|ConnectException|Broken pipe|MasterUnavailable"
    r"|All masters are unresponsive|Could not find CoarseGrainedScheduler|Disk quota exceeded|too large a result"
    r"|is bigger than spark\.driver\.maxResultSize|Failed to connect to"
)
# code that an executor cannot import or unpickle: a function kept in __main__, a module that is only on the driver
_UNREACHED = re.compile(r"AttributeError: Can't get attribute .* on <module|ModuleNotFoundError: No module named")
_OURS = re.compile(r"custody\.errors\.(\w+): (.*)")
_NAMES = {error.__name__: error for error in by_code().values()}
_JAVA_TRACE = re.compile(r"\n\s*at [\w.$]+\(|\nDriver stacktrace|\n\tat ")
_CONTEXT = re.compile(r"\n== (DataFrame|SQL.*?) ==.*", re.DOTALL)


def fault(error: BaseException) -> Fault:
    """Whose fault it is that this job failed."""
    text = _text(error)
    if isinstance(error, AnalysisException | ParseException) or _UNREACHED.search(text):
        return "pipeline"
    if isinstance(error, CustodyError) or _OURS.search(text) or _INFRASTRUCTURE.search(text):
        return "infrastructure"
    return "row"


def ours(error: BaseException) -> CustodyError | None:
    """The error of Custody that a task raised, from the text that Spark made of it."""
    if isinstance(error, CustodyError):
        return error
    found = _OURS.search(_text(error))
    if found is None or found[1] not in _NAMES:
        return None
    return _NAMES[found[1]](found[2].strip())


def worker_died(error: BaseException) -> bool:
    """Whether a Python worker ended in the middle of its task."""
    text = _text(error)
    return "Python worker exited unexpectedly" in text or ("Python worker" in text and "crashed" in text)


def described(error: BaseException) -> str:
    """What a person wants to know of a failed job: the last error of the row's code, without Spark's own frames."""
    text = _text(error).split("\n=== Streaming Query ===")[0]
    if worker_died(error):
        return "the code ended the Python process it ran in (an exit, a crash, or out of memory)"
    if "Traceback (most recent call last):" in text:
        trace = _JAVA_TRACE.split(text[text.rindex("Traceback (most recent call last):") :])[0]
        lines = [line for line in trace.strip().splitlines() if line and not line.startswith(" ")]
        if len(lines) > 1:
            return lines[-1].strip()
    text = _CONTEXT.sub("", text)
    condition = re.search(r"\[[A-Z0-9_.]+\] .*", text)
    found = condition[0] if condition else text
    return _JAVA_TRACE.split(found)[0].strip()[:2000]


def _text(error: BaseException) -> str:
    if isinstance(error, PySparkException):
        return str(error)
    java = getattr(error, "java_exception", None)
    return str(error) if java is None else f"{error}\n{java.toString()}"
