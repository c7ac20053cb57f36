"""The log of a topic as a batch: one task for each partition, several for a long one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from custody.errors import OffsetOutOfRange, PartitionNotFound
from custody.spark.database import arrow
from custody.spark.database.arrow import Bounds, Planner, Read
from custody.spark.format.columns import event_batch
from custody.spark.format.options import EARLIEST, LATEST, Position, ReadOptions
from custody.spark.format.pushdown import OptionalPush, Pushdown


class LogSlice(InputPartition):
    """The part of a partition that one task reads."""

    def __init__(self, partition: int, reads: Sequence[Read]) -> None:
        super().__init__((partition, tuple(reads)))
        self.reads = tuple(reads)


class LogReader(DataSourceReader):
    """Reads a range of every partition. Created and planned on the driver; `read` runs in tasks."""

    def __init__(self, url: str, options: ReadOptions) -> None:
        assert options.topic is not None
        self._url = url
        self._topic = options.topic
        self._options = options
        self._pushed = Pushdown(topic=options.topic)

    @property
    def pushFilters(self) -> OptionalPush:
        """Runs on the driver, before `partitions`."""
        return OptionalPush(self._pushed)

    def partitions(self) -> list[LogSlice]:
        """Runs on the driver. The end of the log is fixed here: later messages are not part of the result."""
        pushed = self._pushed
        with Planner(self._url) as planner:
            every = planner.bounds(self._topic)
            require_partitions(self._topic, every, self._options.starting, self._options.ending)
            if pushed.nothing:
                return []
            slices: list[LogSlice] = []
            for bounds in every:
                if pushed.partitions is None or bounds.partition in pushed.partitions:
                    start, until = self._stretch(planner, bounds)
                    reads = planner.reads(self._topic, bounds.partition, start, until)
                    slices.extend(LogSlice(bounds.partition, read) for read in reads)
            return slices

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task. If there is nothing to read, Spark creates one partition itself."""
        if isinstance(partition, LogSlice):
            for batch in arrow.events(self._url, partition.reads, conditions=self._pushed.conditions):
                yield event_batch(self._topic, batch)

    def _stretch(self, planner: Planner, bounds: Bounds) -> tuple[int, int]:
        options, pushed = self._options, self._pushed
        start = resolve(planner, self._topic, bounds, options.starting, bounds.first)
        start = max(kept(self._topic, bounds, start, options.fail_on_data_loss), pushed.low)
        until = min(resolve(planner, self._topic, bounds, options.ending, bounds.tail), bounds.tail)
        if pushed.high is not None:
            until = min(until, pushed.high)
        # a time is resolved only if something is left to read
        if pushed.since is not None and start < until:
            start = max(start, planner.offset_at(self._topic, bounds.partition, pushed.since))
        if pushed.before is not None and start < until:
            until = min(until, planner.offset_at(self._topic, bounds.partition, pushed.before))
        return start, until


def resolve(planner: Planner, topic: str, bounds: Bounds, position: Position, missing: int) -> int:
    """The offset of a position in a partition; `missing` if the position does not name this partition."""
    if isinstance(position, datetime):
        return planner.offset_at(topic, bounds.partition, position)
    if isinstance(position, str):
        return bounds.first if position == "earliest" else bounds.tail
    offset = position.get(bounds.partition, missing)
    return {EARLIEST: bounds.first, LATEST: bounds.tail}.get(offset, offset)


def kept(topic: str, bounds: Bounds, start: int, fail_on_data_loss: bool) -> int:
    """The start; if that was dropped, the first offset, which is refused unless the user allowed it."""
    if start >= bounds.first:
        return start
    if fail_on_data_loss:
        raise OffsetOutOfRange(
            f"offset {start} of {topic}/{bounds.partition} is gone: the log starts at {bounds.first}",
            "Start at the first offset, or continue there with the option failOnDataLoss=false.",
        )
    return bounds.first


def require_partitions(topic: str, every: Sequence[Bounds], *positions: Position) -> None:
    """Refuses offsets for partitions that the topic does not have."""
    there = {bounds.partition for bounds in every}
    for position in positions:
        for partition in position if isinstance(position, Mapping) else ():
            if partition not in there:
                raise PartitionNotFound(
                    f"{topic} has no partition {partition}", f"It has {len(there)}, numbered from 0."
                )
