"""Reads the messages of a claim in executors, from references directly into Arrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from custody.errors import ClaimLost, InvalidPayload
from custody.spark.database import arrow
from custody.spark.database.tasks import Attempts, Source, reads_of
from custody.spark.faults import SecondTry
from custody.spark.tasks.job import Job
from custody.spark.tasks.schema import checker
from custody.verbs.claim import redelivery_headers
from custody.verbs.pipelines import Ranges

EVENTS = (
    "_claim bigint, _partition int, _offset bigint, _key string, _kind string, _payload binary, "
    "_headers map<string,string>, _attempt int, _published_at timestamp"
)
_HEADERS = pa.map_(pa.string(), pa.string())


class Events(NamedTuple):
    """Messages of one partition, by offset. `before` is the index of each in `attempts`, or -1."""

    claim: int
    partition: int
    columns: pa.RecordBatch
    before: np.ndarray
    attempts: list[Attempts]


@dataclass
class _Place:
    """What a task knows about the claim's messages of one partition."""

    reads: list[Source]
    attempts: list[Attempts]
    ranges: Ranges | None = None


@dataclass
class Reader:
    """Reads for one attempt of a task. Runs in an executor."""

    job: Job
    _places: dict[tuple[int, int], _Place] = field(default_factory=dict)

    def read(self, references: pa.RecordBatch) -> Iterator[Events]:
        """The referenced messages: all of them, or an error."""
        claims, partitions, shares, ofs = (
            references.column(name).to_numpy() for name in ("_claim", "_partition", "_share", "_of")
        )
        offsets = references.column("_offset").to_numpy()
        if self.job.only is not None and (claims != self.job.only).any():
            raise ClaimLost(
                f"claim {self.job.only} is in flight, and not that of the batch", "Another driver may have taken over."
            )
        # adjacent references of one piece are read together
        cuts = np.flatnonzero((np.diff(claims) != 0) | (np.diff(partitions) != 0) | (np.diff(shares) != 0)) + 1
        for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(offsets)], strict=True):
            if first == last:
                continue
            share = (int(shares[first]), int(ofs[first]))
            yield from self._piece(int(claims[first]), int(partitions[first]), offsets[first:last], share)

    def _piece(self, claim: int, partition: int, offsets: np.ndarray, share: tuple[int, int]) -> Iterator[Events]:
        place = self._place(claim, partition)
        stretches = _stretches(offsets) if share[1] == 1 else self._shared(claim, partition, place, offsets)
        reads = reads_of(place.reads, stretches)
        found = 0
        for batch in arrow.events(self.job.url, reads, share=None if share[1] == 1 else share):
            found += batch.num_rows
            seen = batch.column("offset").to_numpy()
            if place.attempts:
                yield Events(claim, partition, batch, _before(seen, place.attempts), place.attempts)
            else:
                yield Events(claim, partition, batch, np.full(len(seen), -1), [])
        if found != len(offsets):
            raise ClaimLost(
                f"{found} of {len(offsets)} messages of claim {claim} are in partition {partition} of the log",
                "They were claimed, so they should be there: check whether retention has dropped them.",
            )

    def _place(self, claim: int, partition: int) -> _Place:
        place = self._places.get((claim, partition))
        if place is None:
            held = self.job.claim(claim)
            place = self._places[claim, partition] = _Place(held.reads(partition), held.attempts(partition))
            if not place.reads:
                raise ClaimLost(f"claim {claim} is no longer in flight", "Another driver may have taken over.")
        return place

    def _shared(self, claim: int, partition: int, place: _Place, offsets: np.ndarray) -> Ranges:
        """The claim's ranges from the first to the last of these offsets; the share by key then selects among them."""
        if place.ranges is None:
            place.ranges = self.job.claim(claim).ranges(partition)
        first, last = int(offsets[0]), int(offsets[-1]) + 1
        return tuple((max(a, first), min(b, last)) for a, b in place.ranges if a < last and b > first)


def second_try() -> bool:
    """Whether this is not the first attempt of its task."""
    context = TaskContext.get()
    return context is not None and context.attemptNumber() > 0


def reader(
    job: Job, slices: Sequence[pa.RecordBatch] | None = None
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For `mapInArrow`: references in, messages as columns out, except those that do not fit the schema.

    With `slices`, task n reads the n-th of them, whatever comes in.
    """

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if job.retry == "refuse" and second_try():
            raise SecondTry("its first attempt has failed")
        if slices is not None or job.retry == "skip":
            batches = list(batches)
        if slices is not None:
            batches = [slices[TaskContext.get().partitionId()]]  # type: ignore[union-attr]  # there is one
        if job.retry == "skip" and second_try():
            return
        reading = Reader(job)
        fits = None if job.schema is None else checker(job.schema)
        for references in batches:
            for events in reading.read(references):
                yield frame_columns(events) if fits is None else _fitting(job, events, fits)

    return read


def _fitting(job: Job, events: Events, fits: Callable[[str, bytes], object]) -> pa.RecordBatch:
    """The messages whose payload fits the schema. The others are recorded, and dead with the commit."""
    offsets, kinds, payloads = (events.columns.column(name).to_pylist() for name in ("offset", "kind", "payload"))
    bad: list[tuple[int, int, str]] = []
    for offset, kind, payload in zip(offsets, kinds, payloads, strict=True):
        try:
            fits(kind, payload)
        except InvalidPayload as error:
            bad.append((events.partition, offset, str(error)))
    columns = frame_columns(events)
    if not bad:
        return columns
    job.claim(events.claim).note_malformed(bad)
    wrong = pa.array([offset for _, offset, _ in bad], pa.int64())
    return columns.filter(pc.invert(pc.is_in(columns.column("_offset"), wrong)))


def frame_columns(events: Events) -> pa.RecordBatch:
    """Messages as the columns of a frame."""
    columns, count = events.columns, events.columns.num_rows
    attempt = np.ones(count, dtype=np.int32)
    headers = [None if text is None else msgspec.json.decode(text) for text in columns.column("headers").to_pylist()]
    for n in np.flatnonzero(events.before >= 0).tolist():
        before = events.attempts[events.before[n]]
        attempt[n] = before.attempt
        headers[n] = redelivery_headers(headers[n], before.attempt, before.first_delivery, before.last_error)
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(events.claim, pa.int64()), count),
            columns.column("partition"),
            columns.column("offset"),
            columns.column("key"),
            columns.column("kind"),
            columns.column("payload"),
            pa.array([None if one is None else list(one.items()) for one in headers], _HEADERS),
            pa.array(attempt),
            columns.column("published_at"),
        ],
        names=[name.split()[0] for name in EVENTS.split(", ")],
    )


def _stretches(offsets: np.ndarray) -> Ranges:
    cuts = np.flatnonzero(np.diff(offsets) != 1)
    firsts = offsets[np.concatenate(([0], cuts + 1))].tolist()
    lasts = offsets[np.concatenate((cuts, [len(offsets) - 1]))].tolist()
    return tuple((first, last + 1) for first, last in zip(firsts, lasts, strict=True))


def _before(offsets: np.ndarray, attempts: list[Attempts]) -> np.ndarray:
    """For each offset the index of the entry that holds it, or -1."""
    which = np.full(len(offsets), -1)
    for number, entry in enumerate(attempts):
        for first, last in entry.ranges:
            which[np.searchsorted(offsets, first) : np.searchsorted(offsets, last)] = number
    return which
