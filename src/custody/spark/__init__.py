"""Pipelines on Spark: ordered by key, exactly-once from topic to topic, and not stopped by a bad row."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from custody import extras

if TYPE_CHECKING:
    from custody.spark.expectations import expect
    from custody.spark.figures import Batch, PipelineSummary
    from custody.spark.outside.delta import Delta
    from custody.spark.outside.iceberg import Iceberg
    from custody.spark.outside.jdbc import Jdbc
    from custody.spark.outside.sinks import Files, Write
    from custody.spark.pipeline import Pipeline
    from custody.spark.tasks.each import To
    from custody.spark.tasks.frame import fail_when, skip_when
    from custody.spark.tasks.marks import fail, skip
    from custody.spark.tasks.states import KeyState

__all__ = [
    "Batch", "Delta", "Files", "Iceberg", "Jdbc", "KeyState", "Pipeline", "PipelineSummary", "To", "Write", "expect",
    "fail", "fail_when", "skip", "skip_when",
]  # fmt: skip

_HOME = {
    "Batch": "figures", "Delta": "outside.delta", "Files": "outside.sinks", "Iceberg": "outside.iceberg",
    "Jdbc": "outside.jdbc", "KeyState": "tasks.states", "Pipeline": "pipeline", "PipelineSummary": "figures",
    "To": "tasks.each", "Write": "outside.sinks", "expect": "expectations", "fail_when": "tasks.frame",
    "skip_when": "tasks.frame", "fail": "tasks.marks", "skip": "tasks.marks",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Imports lazily: looking for Java, or defining a pipeline, does not need Spark."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extras.named():
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
