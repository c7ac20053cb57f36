"""Spark looks for modules named pyspark_* and registers their `DefaultSource`: so `format("custody")` simply works."""

from __future__ import annotations

from custody.spark.format.source import CustodySource


class DefaultSource(CustodySource):
    """The source `custody`."""
