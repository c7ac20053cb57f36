"""Rows of the log in Arrow, where a row is a message or a batch, as messages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

NAMES = ("partition", "offset", "published_at", "key", "kind", "payload", "headers")


def messages(rows: pa.RecordBatch, ranges: np.ndarray | None) -> Iterator[pa.RecordBatch]:
    """The messages of these rows whose offset is in one of the ranges (lower and upper bounds, in order).

    The buffers of the payloads are taken as they are.
    """
    if "ends" not in rows.schema.names:
        yield rows
        return
    ends = rows.column("ends")
    if ends.null_count == rows.num_rows:
        yield rows.select(NAMES)
        return
    single = ends.is_null().to_numpy(zero_copy_only=False)
    cuts = np.flatnonzero(np.diff(single)) + 1
    for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), rows.num_rows], strict=True):
        run = rows.slice(first, last - first)
        if single[first]:
            yield run.select(NAMES)
        else:
            yield from _wanted(_unpacked(run), ranges)


def _unpacked(rows: pa.RecordBatch) -> pa.RecordBatch:
    ends, payload = rows.column("ends"), rows.column("payload")
    counts = ends.value_lengths().to_numpy()
    until = np.cumsum(counts)
    total = int(until[-1])
    _, places, data = payload.buffers()
    starts = np.frombuffer(places, np.int32)[payload.offset : payload.offset + len(payload) + 1]
    bounds = np.empty(total + 1, np.int32)
    bounds[0] = starts[0]
    first = rows.column("offset").to_numpy()
    if "taken" in rows.schema.names:
        bounds[1:] = starts[0] + np.cumsum(ends.flatten().to_numpy())
        offsets = np.repeat(first - 1, counts) + rows.column("taken").flatten().to_numpy()
    else:
        bounds[1:] = ends.flatten().to_numpy() + np.repeat(starts[:-1], counts)
        offsets = np.repeat(first - (until - counts), counts) + np.arange(total)
    parents = pa.array(np.repeat(np.arange(len(counts)), counts))
    return pa.RecordBatch.from_arrays(
        [
            rows.column("partition").take(parents),
            pa.array(offsets),
            rows.column("published_at").take(parents),
            _flat(rows.column("keys"), counts, total),
            _letters(rows.column("kind"), parents, counts, total),
            pa.BinaryArray.from_buffers(pa.binary(), total, [None, pa.py_buffer(bounds), data]),
            _flat(rows.column("headers_each"), counts, total),
        ],
        names=list(NAMES),
    )


def _flat(lists: pa.ListArray, counts: np.ndarray, total: int) -> pa.Array:
    if lists.null_count == 0:
        return lists.flatten()
    if lists.null_count == len(lists):
        return pa.nulls(total, pa.string())
    each = zip(lists, counts.tolist(), strict=True)
    return pa.concat_arrays([one.values if one.is_valid else pa.nulls(count, pa.string()) for one, count in each])


def _letters(kinds: pa.StringArray, parents: pa.Array, counts: np.ndarray, total: int) -> pa.Array:
    if pc.max(pc.binary_length(kinds)).as_py() == 1:
        return kinds.take(parents)
    each = zip(kinds.to_pylist(), counts.tolist(), strict=True)
    text = "".join(kind if len(kind) == count else kind * count for kind, count in each)
    places = pa.py_buffer(np.arange(total + 1, dtype=np.int32))
    return pa.StringArray.from_buffers(total, places, pa.py_buffer(text.encode()))


def _wanted(found: pa.RecordBatch, ranges: np.ndarray | None) -> Iterator[pa.RecordBatch]:
    offsets = found.column("offset").to_numpy()
    if len(offsets) == 0:
        return
    if ranges is not None:
        which = np.searchsorted(ranges[:, 1], offsets, side="right")
        inside = (which < len(ranges)) & (ranges[np.minimum(which, len(ranges) - 1), 0] <= offsets)
        if not inside.all():
            found = found.filter(pa.array(inside))
    yield found
