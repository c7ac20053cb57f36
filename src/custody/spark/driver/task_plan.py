"""Decides from a job's plan whether each of its tasks does everything for the messages that it reads.

Then a task whose first attempt has failed can be left out, and the results of the others count. After a shuffle a task
has rows of messages that other tasks read.
"""

from __future__ import annotations

import re
from typing import Any

from pyspark import SparkContext
from pyspark.sql import DataFrame

_ATTEMPTS = re.compile(r"local(?:\[[^,\]]*(?:,\s*(\d+)\s*)?\])?")
# physical operators that have one task for each task of their input; a join if its other side is broadcast
_ALIKE = {"AdaptiveSparkPlanExec", "WholeStageCodegenExec", "InputAdapter", "ProjectExec", "FilterExec", "GenerateExec",
          "ExpandExec", "SortExec", "MapInArrowExec", "MapInPandasExec", "ArrowEvalPythonExec", "BatchEvalPythonExec",
          "ColumnarToRowExec", "BroadcastHashJoinExec", "BroadcastNestedLoopJoinExec"}  # fmt: skip


def attempts(context: SparkContext) -> int:
    """How many attempts a task has before its job fails. A local master says so itself, and ignores the setting."""
    local = _ATTEMPTS.fullmatch(str(context.master))
    if local is not None:
        return int(local[1] or 1)
    return int(context.getConf().get("spark.task.maxFailures", "4") or 4)


def is_one_stage(rows: DataFrame, messages: DataFrame) -> bool:
    """Whether task n of a job over these rows reads partition n of the messages, and makes all rows of it."""
    return _reads(rows._jdf.queryExecution().executedPlan(), messages._jdf.logicalPlan())


def _reads(plan: Any, messages: Any) -> bool:
    name = plan.getClass().getSimpleName()
    if name == "AdaptiveSparkPlanExec":
        return _reads(plan.executedPlan(), messages)
    if name == "RangeExec":
        return bool(plan.range().equals(messages))
    if name == "RDDScanExec":
        return messages.getClass().getSimpleName() == "LogicalRDD" and bool(plan.rdd().equals(messages.rdd()))
    children = plan.children()
    below = [children.apply(number) for number in range(children.size())]
    streamed = [child for child in below if child.getClass().getSimpleName() != "BroadcastExchangeExec"]
    return name in _ALIKE and len(streamed) == 1 and _reads(streamed[0], messages)
