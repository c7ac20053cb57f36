"""The log of a topic as a stream. Spark's offset is the next offset of each partition: {"0": 17, "1": 5}."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from custody.errors import OffsetOutOfRange
from custody.spark.database import arrow
from custody.spark.database.arrow import Bounds, Planner
from custody.spark.format.columns import event_batch
from custody.spark.format.log_reader import LogSlice, kept, require_partitions, resolve
from custody.spark.format.options import ReadOptions

IDLE_WAIT = 1.0  # seconds that an idle stream waits in `latestOffset`; without it Spark asks 86 times a second
POLL = 0.05

Offsets = dict[str, int]


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Runs in one process beside the driver for as long as its query; `read` runs in tasks, on a pickled copy."""

    def __init__(self, url: str, options: ReadOptions) -> None:
        assert options.topic is not None
        self._url = url
        self._topic = options.topic
        self._options = options
        self._planner: Planner | None = None
        self._initial: Offsets | None = None
        self._target: Offsets | None = None
        self._seen: Offsets | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None}  # a connection cannot be pickled

    def initialOffset(self) -> Offsets:
        """Runs on the driver, for a new checkpoint only. Spark asks twice and must get the same answer."""
        if self._initial is None:
            starting = self._options.starting
            every = self._bounds()
            require_partitions(self._topic, every, starting)
            self._initial = {
                str(bounds.partition): kept(
                    self._topic,
                    bounds,
                    resolve(self._plan(), self._topic, bounds, starting, bounds.first),
                    self._options.fail_on_data_loss,
                )
                for bounds in every
            }
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        """Runs on the driver."""
        return ReadAllAvailable() if self._options.max_rows is None else ReadMaxRows(self._options.max_rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Runs on the driver, first of all: messages published from now on are not part of this run."""
        self._target = _tails(self._bounds())

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        """Runs on the driver, once for each trigger. If there is nothing new, it waits before it returns."""
        deadline = time.monotonic() + IDLE_WAIT
        while True:
            every = self._bounds()
            self._refuse_shorter(start, every)
            self._seen = _tails(every)
            end = self._end(start, every, limit)
            if end != start or self._target is not None or time.monotonic() >= deadline:
                return end
            time.sleep(POLL)

    def reportLatestOffset(self) -> Offsets | None:
        """Runs on the driver, for the listener: the ends of the log as `latestOffset` saw them."""
        return self._seen

    def partitions(self, start: Offsets, end: Offsets) -> list[LogSlice]:
        """Runs on the driver. Deterministic for the same offsets, so that a replayed batch is the same batch."""
        every = self._bounds()
        self._refuse_shorter(end, every)
        slices: list[LogSlice] = []
        for bounds in every:
            until = end.get(str(bounds.partition))
            if until is not None:
                begin = self._begin(start, bounds, until)
                reads = self._plan().reads(self._topic, bounds.partition, begin, until)
                slices.extend(LogSlice(bounds.partition, read) for read in reads)
        return slices

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task."""
        assert isinstance(partition, LogSlice)
        for batch in arrow.events(self._url, partition.reads):
            yield event_batch(self._topic, batch)

    def commit(self, end: Offsets) -> None:
        """Does nothing: a reader does not shorten the log."""

    def stop(self) -> None:
        """Runs on the driver, if at all: Spark may just end the process."""
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _plan(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._url)
        return self._planner

    def _bounds(self) -> list[Bounds]:
        return self._plan().bounds(self._topic)

    def _begin(self, start: Offsets, bounds: Bounds, until: int) -> int:
        """Where a partition continues. One added since the start, or created again, is read from its first offset."""
        begin = start.get(str(bounds.partition), bounds.first)
        if begin > until:  # only after allowed data loss
            return bounds.first
        return kept(self._topic, bounds, begin, self._options.fail_on_data_loss)

    def _refuse_shorter(self, there: Offsets, every: list[Bounds]) -> None:
        """Refuses a log that has become shorter: it is another topic of the same name."""
        tails = _tails(every)
        for name, offset in there.items() if self._options.fail_on_data_loss else ():
            if offset > tails.get(name, 0):
                raise OffsetOutOfRange(
                    f"{self._topic}/{name} ends at {tails.get(name, 0)}, but this stream has read up to {offset}",
                    "If the topic was created again, use a new checkpoint, or the option failOnDataLoss=false.",
                )

    def _end(self, start: Offsets, every: list[Bounds], limit: ReadLimit) -> Offsets:
        begins, ends = dict[str, int](), dict[str, int]()
        for bounds in every:
            name = str(bounds.partition)
            if self._target is None or name in self._target:
                ends[name] = bounds.tail if self._target is None else min(bounds.tail, self._target[name])
                begins[name] = self._begin(start, bounds, ends[name])
        if not isinstance(limit, ReadMaxRows):
            return ends
        waiting = {name: ends[name] - begins[name] for name in ends}
        taken = shared(limit.max_rows, waiting, turn=sum(begins.values()))
        return {name: begins[name] + taken[name] for name in ends}


def shared(rows: int, available: Mapping[str, int], turn: int) -> dict[str, int]:
    """Divides a number of rows evenly among partitions; what one does not need goes to the others.

    With fewer rows than partitions, partitions take turns, so that none starves.
    """
    waiting = [name for name in available if available[name] > 0]
    taken = dict.fromkeys(available, 0)
    if rows < len(waiting):
        for place in range(rows):
            taken[waiting[(turn + place) % len(waiting)]] = 1
        return taken
    for place, name in enumerate(sorted(waiting, key=lambda name: available[name])):
        taken[name] = min(available[name], rows // (len(waiting) - place))
        rows -= taken[name]
    return taken


def _tails(every: list[Bounds]) -> Offsets:
    return {str(bounds.partition): bounds.tail for bounds in every}
