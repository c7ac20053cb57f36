"""Finds the messages whose rows a sink outside of the database refuses. Runs in the driver.

A row is at fault only if the sink accepts other rows, or reports that the data is invalid. A sink that accepts nothing
is down or misconfigured: the pipeline retries or ends, and no message fails. Trial writes do not count: the accepted
rows are written once more, together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any

from pyspark import SparkContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from custody.errors import CustodyError, PipelineFailed
from custody.spark.driver.isolate import Isolation, Reference
from custody.spark.faults import GONE, NotTheRows, described, fault
from custody.spark.outside.cached_rows import LOST
from custody.spark.outside.sinks import Outside
from custody.verbs.pipelines import BatchReport

TRIALS = 8
"""Messages that are tried alone before concluding that a sink accepts nothing; fewer if it seems to be down."""
TRIALS_OF_ONE_DOWN = 2

_DOWN = re.compile(
    r"Connection refused|Connection reset|[Tt]imed? ?out|Timeout|[Uu]nreachable|UnknownHost|unavailable|Broken pipe"
    r"|could not connect|Communications link|Connection\w*Exception|SQLTransient|SQLRecoverable|too many connections"
)
_CONNECTION, _WRONG_DATA = ("08", "40", "53", "57"), ("22", "23", "44")
"""Classes of SQLSTATE: no connection, a conflict, no resources, a shutdown; and invalid data, or a constraint."""


class SinkTrouble(Exception):
    """A sink outside did not accept its rows. `down`: it seems to be unreachable."""

    def __init__(self, sink: Outside, claim: int, cause: Exception) -> None:
        self.sink, self.claim, self.cause = sink, claim, cause
        self.down = is_down(cause)
        super().__init__(f"{sink.name} did not accept claim {claim}: {sink_error(cause)}")


@dataclass(frozen=True, kw_only=True)
class Refusals:
    """One sink that has refused the rows of a claim more than once."""

    sink: Outside
    claim: int
    rows: DataFrame
    write: Callable[[DataFrame], None]
    """Writes some of the rows as a trial."""
    stopping: Callable[[], bool]
    trouble: Callable[[str], None]

    def found(self, cause: Exception) -> BatchReport:
        """The messages that the sink refuses, each with its reason, and those that were not tried.

        Raises if the sink itself fails: SinkTrouble if it may recover, else the error that ends the pipeline.
        """
        messages = sorted(tuple(row) for row in self.rows.select("_partition", "_offset").distinct().collect())
        found = sink_error(cause)
        self.trouble(f"writing claim {self.claim} in parts to find what {self.sink.name} refuses: {found}")
        nothing = self._tried([])
        if nothing is not None:
            raise self._of_the_sink(nothing) from nothing
        if not says_that_data_is_wrong(cause) and not self._takes_any(messages, cause):
            raise self._of_the_sink(cause) from cause
        isolation = Isolation(
            run=self._run,
            stopping=self.stopping,
            describe=lambda error: f"{self.sink.name}: {sink_error(error)}",
            blameless=False,
        )
        return isolation.of(messages)

    def _takes_any(self, messages: list[Reference], cause: Exception) -> bool:
        """Whether the sink accepts any message alone. The messages tried are spread over the claim."""
        trials = min(len(messages), TRIALS_OF_ONE_DOWN if is_down(cause) else TRIALS)
        return any(self._tried([messages[len(messages) * n // trials]]) is None for n in range(trials))

    def _tried(self, part: list[Reference]) -> Exception | None:
        try:
            self._run(part)
        except Exception as error:
            if not is_refusal(error):
                raise
            return error
        return None

    def _run(self, part: list[Reference]) -> BatchReport:
        """`part` is a run of the sorted messages, so ranges of offsets describe it."""
        bounds: dict[int, tuple[int, int]] = {}
        for partition, offset in part:
            bounds[partition] = (bounds.get(partition, (offset, offset))[0], offset)
        within = [
            (F.col("_partition") == partition) & F.col("_offset").between(first, last)
            for partition, (first, last) in bounds.items()
        ]
        try:
            self.write(self.rows.where(reduce(Column.__or__, within) if within else F.lit(False)))
        except Exception as error:
            if LOST in str(error):
                raise NotTheRows(LOST) from error
            raise
        return BatchReport()

    def _of_the_sink(self, error: Exception) -> Exception:
        return SinkTrouble(self.sink, self.claim, error) if is_down(error) else stopped(self.sink, self.claim, error)


def stopped(sink: Outside, claim: int, error: Exception) -> PipelineFailed:
    """The error that ends a pipeline whose sink accepts nothing."""
    return PipelineFailed(
        f"{sink.name} accepts no row of claim {claim}, so no single row is at fault: {sink_error(error)}",
        "Fix the sink and start the pipeline again: nothing was lost, and no failure was counted.",
    )


def not_repeatable(sink: Outside, claim: int, error: Exception) -> PipelineFailed:
    """The error that ends a pipeline whose sink accepts a claim in parts, but not as a whole."""
    return PipelineFailed(
        f"{sink.name} accepted the rows of claim {claim} in parts, but refused the same rows together: "
        f"{sink_error(error)}",
        "Rows of a claim may be written again: replace what `write.claim` wrote before, or write by key (an upsert). "
        "Nothing was lost, and no failure was counted.",
    )


def is_refusal(error: Exception) -> bool:
    """Whether a sink may have failed because of its rows."""
    if isinstance(error, CustodyError) or (isinstance(error, GONE) and not _spark_lives()):
        return False
    return LOST not in str(error) and fault(error) != "infrastructure"


def _spark_lives() -> bool:
    """Whether Spark's JVM is alive. A sink that refuses a connection raises the same error as a dead JVM."""
    context = SparkContext._active_spark_context
    try:
        return context is not None and not context._jsc.sc().isStopped()
    except GONE:
        return False


def is_down(error: Exception) -> bool:
    """Whether the sink seems to be unreachable. Decides only between retrying and ending, never about a row."""
    if isinstance(error, ConnectionError | TimeoutError) or any(map(_CONNECTION.__contains__, _states(error))):
        return True
    return any(_DOWN.search(text) for text in _texts(error))


def says_that_data_is_wrong(error: Exception) -> bool:
    """Whether the sink is a database that reports invalid data, by SQLSTATE, which no row can influence."""
    return any(map(_WRONG_DATA.__contains__, _states(error)))


def sink_error(error: Exception) -> str:
    """The sink's own error: the innermost Java exception, or the Python exception."""
    causes = list(_causes(error))
    return described(error) if not causes or "Traceback" in str(error) else str(causes[-1].toString())[:2000]


def _texts(error: Exception) -> Iterator[str]:
    return chain([f"{type(error).__name__}: {error}"], (str(cause.toString()) for cause in _causes(error)))


def _states(error: Exception) -> Iterator[str]:
    """The classes of the SQLSTATEs of an error."""
    context = SparkContext._active_spark_context
    if context is None:
        return
    classes: Any = context._jvm.java.lang.Class  # type: ignore[union-attr]
    sql_exception = classes.forName("java.sql.SQLException")
    for cause in _causes(error):
        if sql_exception.isInstance(cause) and cause.getSQLState() is not None:
            yield str(cause.getSQLState())[:2]


def _causes(error: BaseException | None) -> Iterator[Any]:
    """The Java exceptions behind a Python exception, from the outermost to the innermost."""
    while error is not None:
        java = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
        while java is not None:
            yield java
            java = java.getCause()
        error = error.__cause__
