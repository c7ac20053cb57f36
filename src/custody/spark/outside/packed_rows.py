"""Rows of a claim on their way to the driver: tasks pack them into Arrow batches, which the driver takes one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

ROWS = 100_000
"""Most rows of one batch."""
BYTES = 16 * 2**20
"""A batch ends when its rows take so much memory: some databases refuse longer values."""


def packed(rows: DataFrame) -> Iterator[bytes]:
    """The rows in batches, each as an Arrow stream. The driver has the batches of two partitions at a time."""
    for row in rows.mapInArrow(_pack, "rows binary").toLocalIterator(prefetchPartitions=True):
        yield bytes(row["rows"])


def unpacked(batch: bytes) -> pa.Table:
    with pa.ipc.open_stream(batch) as reader:
        return reader.read_all()


def _pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`. Runs in tasks."""
    waiting: list[pa.RecordBatch] = []
    for batch in batches:
        waiting.append(batch)
        if sum(one.num_rows for one in waiting) >= ROWS or sum(one.nbytes for one in waiting) >= BYTES:
            yield _stream(waiting)
            waiting = []
    if any(one.num_rows for one in waiting):
        yield _stream(waiting)


def _stream(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return pa.RecordBatch.from_arrays([pa.array([sink.getvalue().to_pybytes()], pa.binary())], names=["rows"])
