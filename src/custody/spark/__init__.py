"""Pipelines on Spark: ordered, exactly-once from topic to topic, and not to be stopped by a bad row."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from custody.spark.each import To
    from custody.spark.figures import Batch, Summary
    from custody.spark.frame import fail_when
    from custody.spark.outside import Files, Write
    from custody.spark.pipeline import Pipeline

__all__ = ["Batch", "Files", "Pipeline", "Summary", "To", "Write", "fail_when"]

_HOME = {
    "Batch": "figures", "Files": "outside", "Pipeline": "pipeline", "Summary": "figures", "To": "each",
    "Write": "outside", "fail_when": "frame",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loads what is asked for: looking for Java, or defining a pipeline, does not need Spark."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
