"""Calls a batch handler with messages, and gives each of them an outcome and its outputs. Runs in executors.

It needs neither a task of Spark nor the database, so that trials and tests do the same as a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, cast

import pyarrow as pa

from custody.model.outcomes import Outcome
from custody.spark.batch_handlers import BatchHandler
from custody.spark.causes import MALFORMED
from custody.spark.tasks.halving import Answer, Failure, Halving, Outcomes
from custody.spark.tasks.job import Job
from custody.spark.tasks.message_columns import MessageColumns
from custody.spark.tasks.results import Placing, Results

Timed = Callable[[BatchHandler, pa.RecordBatch, bool], object]
"""Calls the handler with these rows. The third argument says whether they are a part of the rows of an earlier call."""


def untimed(handler: BatchHandler, rows: pa.RecordBatch, _: bool) -> object:
    return handler(rows)


class Calls:
    """The calls of one attempt of a task, for messages in the order of the log."""

    def __init__(self, job: Job, handler: BatchHandler, timed: Timed = untimed) -> None:
        on_dead = cast("Literal['release', 'hold']", job.on_dead)
        self._ordered, self._handler, self._timed = job.ordered, handler, timed
        self._columns, self._results = MessageColumns(job.schema), Results(job)
        self._halving: Halving[Placing] = Halving(
            stops=lambda outcome: outcome.stops_key(on_dead), unproven=job.unproven
        )
        self.first = self._results.first

    def of(self, messages: pa.RecordBatch, ended: Mapping[int, str] | None = None) -> Outcomes[Placing]:
        """The outcomes of messages (columns of a claim) by their row. `ended`: errors of rows that must not run."""
        batch, malformed = self._columns.of(messages)
        given = {row: Failure(Outcome("dead", error=error), MALFORMED) for row, error in malformed.items()}
        given |= {row: Failure(Outcome("nack", error=error)) for row, error in (ended or {}).items()}
        called = False

        def call(rows: Sequence[int]) -> Answer[Placing]:
            nonlocal called
            part = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows, pa.int64()))
            again, called = called, True
            return self._results.of(part, self._timed(self._handler, part, again)).numbered(rows)

        return self._halving.of(self._keys(batch), call, given)

    def leave(self, messages: pa.RecordBatch) -> None:
        """Leaves these messages, so that later ones of their keys do not overtake them."""
        self._halving.stopped.update(key for key in self._keys(messages) if key is not None)

    def _keys(self, messages: pa.RecordBatch) -> list[tuple[int, str] | None]:
        """What is in order: the messages of a key in a partition."""
        if not self._ordered:
            return [None] * messages.num_rows
        partitions, keys = (messages.column(name).to_pylist() for name in ("_partition", "_key"))
        return [None if key is None else (partition, key) for partition, key in zip(partitions, keys, strict=True)]
