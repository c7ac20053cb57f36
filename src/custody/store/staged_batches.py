"""Cuts the outputs of a task for one partition into batches, which are the rows that the log will have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

from custody.model.codec import Encoded
from custody.store import packed

FROM, MOST, BYTES, SMALL = 16, 1000, 256_000, 1000
"""Messages that are enough for batches, most messages and bytes of one, and from which size on messages are rows of
their own: as in `store/sql/log/append.sql`."""

Source = tuple[int, int]
"""The partition and offset of the message that an output was made of."""


class Batch(NamedTuple):
    """A row of the log: the number of its first message within the attempt, the sources and the messages."""

    n: int
    sources: Sequence[Source]
    messages: Sequence[Encoded]

    def arguments(self) -> dict[str, Any]:
        """The batch as arguments of `custody.stage_batch`."""
        partition, first = self.sources[0]
        columns = packed.joined_columns(self.messages)
        del columns["payloads"]
        return {
            "n": self.n,
            "source_partition": partition,
            "source_offset": first,
            "sources": packed.integers(offset - first for _, offset in self.sources),
            **columns,
        }


def batches(messages: Sequence[Encoded], sources: Sequence[Source]) -> list[Batch] | None:
    """The batches of these messages. Within a batch the sources are of one partition and do not decrease. None if the
    messages are too few, too large, or too far from the order of their sources."""
    count = len(messages)
    if count < FROM or _size(messages) >= count * SMALL:
        return None
    starts = [0, *(n for n, (a, b) in enumerate(pairwise(sources), 1) if b < a or b[0] != a[0])]
    if len(starts) * FROM > count:
        return None
    made = [
        Batch(n, sources[n:end], messages[n:end])
        for start, stop in zip(starts, [*starts[1:], count], strict=True)
        for n, end in _cuts(messages, start, stop)
    ]
    return None if any(batch.sources[-1][1] - batch.sources[0][1] >= 1 << 31 for batch in made) else made


def _cuts(messages: Sequence[Encoded], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Where batches of about equal length begin and end."""
    count, size = stop - start, _size(messages[start:stop])
    each = ceil(count / max(ceil(count / MOST), ceil(size / BYTES)))
    for n in range(start, stop, each):
        yield n, min(n + each, stop)


def _size(messages: Sequence[Encoded]) -> int:
    return sum(len(payload) + len(headers or b"") for _, _, payload, headers in messages)
