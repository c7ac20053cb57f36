"""The views `deliveries`, `dead_letters` and `journal` as batches."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from custody.spark.database import arrow
from custody.spark.database.arrow import Condition, Planner
from custody.spark.format.columns import TABLES, fitted
from custody.spark.format.options import ReadOptions

_VIEWS = {"journal": "history"}  # the view of the journal with names instead of numbers


class ViewReader(DataSourceReader):
    """Reads a view in one task, because it has far fewer rows than the log has messages."""

    def __init__(self, url: str, options: ReadOptions) -> None:
        self._url = url
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """Runs on the driver. Refuses an unknown topic or group: an empty result would hide the mistake."""
        topic, group = self._options.topic, self._options.group
        with Planner(self._url) as planner:
            if topic is not None:
                planner.bounds(topic)
                if group is not None:
                    planner.require_group(topic, group)
        return [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - there is only one
        """Runs in a task."""
        schema = TABLES[self._options.table]
        named = {"topic": self._options.topic, "consumer_group": self._options.group}
        conditions: list[Condition] = [(column, "=", value) for column, value in named.items() if value is not None]
        name = _VIEWS.get(self._options.table, self._options.table)
        for batch in arrow.view(self._url, name, schema.fieldNames(), conditions):
            yield fitted(schema, dict(zip(batch.schema.names, batch.columns, strict=True)))
