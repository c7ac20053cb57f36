"""Reads directly into Arrow, without Python objects: events by offset, and views; and plans such reads.

ADBC streams a COPY into Arrow's columns at more than a million rows a second. Planning uses the SQL functions, because
it needs their errors with codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from custody import config
from custody.errors import DatabaseUnavailable, InvalidArgument
from custody.store import batches
from custody.store.adbc import fetch
from custody.store.arrow import Condition, select_events, select_view
from custody.store.migrate import check
from custody.store.postgres import Database
from custody.store.postmaster import Home
from custody.verbs import log

__all__ = ["Bounds", "Condition", "Planner", "Read", "events", "locate", "offsets", "view"]

BATCH_ROWS = 10_000
SLICE_ROWS = 250_000
"""Offsets that one task reads: a few tenths of a second of work."""

_RANGE = re.compile(r"\[(\d+),(\d+)\)")

Read = tuple[str, str]
"""A table of the log with its partition ("custody.log_7 WHERE partition = 3"), and a multirange of offsets."""


class Bounds(NamedTuple):
    """A partition: its first available offset, and its next one."""

    partition: int
    first: int
    tail: int


def events(
    url: str,
    reads: Iterable[Read],
    *,
    batch_rows: int = BATCH_ROWS,
    conditions: Sequence[Condition] = (),
    share: tuple[int, int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The events of these reads, one read after the other, each by offset, in batches of at most `batch_rows`.

    Columns: partition int32, offset int64, published_at timestamp[us, UTC], key string, kind string (j, t or b),
    payload binary, headers string (JSON). `share` (k, m) takes the k-th of m parts, from 0 on: all messages of a key
    are in one part, those without a key are spread. A dropped segment raises `offset_out_of_range`.
    """
    reads = list(reads)
    statements = [select_events(source, ranges, conditions, share) for source, ranges in reads]
    return _messages(url, list(zip(statements, reads, strict=True)), batch_rows)


def _messages(url: str, statements: Sequence[tuple[str, Read]], batch_rows: int) -> Iterator[pa.RecordBatch]:
    for statement, (_, ranges) in statements:
        bounds = np.array(_RANGE.findall(ranges), dtype=np.int64)
        for rows in fetch(url, [statement]):
            for found in batches.messages(rows, bounds):
                for first in range(0, found.num_rows, batch_rows):
                    yield found.slice(first, batch_rows)


def offsets(url: str, reads: Iterable[Read], *, share: tuple[int, int] | None = None) -> Iterator[pa.RecordBatch]:
    """Only the offsets of what `events` would read."""
    statements = [select_events(source, ranges, share=share, offsets_only=True) for source, ranges in reads]
    return _fetch(url, statements, BATCH_ROWS)


def view(
    url: str,
    name: str,
    columns: Sequence[str],
    conditions: Sequence[Condition] = (),
    *,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[pa.RecordBatch]:
    """Columns of a view (deliveries, dead_letters, history …). Multiranges, uuids and JSON come as text."""
    return _fetch(url, [select_view(name, columns, conditions)], batch_rows)


def _fetch(url: str, statements: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    if statements:
        for batch in fetch(url, statements):
            for first in range(0, batch.num_rows, batch_rows):
                yield batch.slice(first, batch_rows)


class Planner:
    """Plans reads: bounds, times, tables. Holds a connection; close it, or use it as a context manager."""

    def __init__(self, url: str) -> None:
        self._db = Database(url, pool_size=1).require(check)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def bounds(self, topic: str) -> list[Bounds]:
        """Every partition of a topic, in order."""
        return [Bounds(*row) for row in self._db.call("partitions", topic=topic)]

    def offset_at(self, topic: str, partition: int, time: datetime) -> int:
        """The first offset of a partition that was published at that time or later."""
        return log.offset_at(self._db, topic, partition, time)

    def require_group(self, topic: str, group: str) -> None:
        self._db.call("group_named", topic=topic, group=group)

    def reads(self, topic: str, partition: int, start: int, until: int, *, rows: int | None = None) -> list[list[Read]]:
        """[start, until) of a partition as slices of `rows` offsets at most (SLICE_ROWS), each with its reads.

        A start below the first offset raises `offset_out_of_range`.
        """
        bounds: dict[str, Any] = {"from": start, "until": until}
        slices: list[list[Read]] = []
        rows, room = rows or SLICE_ROWS, 0
        for source, first, end in self._db.call("log_reads", topic=topic, partition=partition, **bounds):
            while first < end:
                if room == 0:
                    slices.append([])
                    room = rows
                taken = min(end - first, room)
                slices[-1].append((source, f"{{[{first},{first + taken})}}"))
                first, room = first + taken, room - taken
        return slices


def locate(url: str | None = None) -> str:
    """The URL of the database: the one given, that of CUSTODY_DATABASE or `custody.yaml`, or the embedded one's.

    The embedded server must run already: a reader in another process can neither start it nor keep it alive.
    """
    settings = config.load()
    url = url or settings.database
    if url is None:
        postmaster = Home.at(settings.home).postmaster()
        if postmaster is None or not postmaster.answers():
            raise DatabaseUnavailable(
                f"no database is configured, and no embedded one is running in {settings.home}",
                "Give one (a postgresql:// URL, or CUSTODY_DATABASE), or keep custody.connect() open meanwhile.",
            )
        return postmaster.url
    if not url.startswith(("postgresql://", "postgres://")):
        raise InvalidArgument("the URL is not that of a database", "Give one that begins with postgresql://.")
    return url
