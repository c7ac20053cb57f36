"""The database calls of a pipeline's tasks, over the one connection that an executor's Python process keeps."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from custody.elapsed import elapsed, holds_until
from custody.model.codec import Encoded
from custody.store import staging
from custody.store.postgres import Row
from custody.store.staged_batches import batches
from custody.verbs.pipelines import Overdue, Ranges, Sink, StagedCount, ranges_of, stage_of


class Attempts(NamedTuple):
    """Messages that were delivered before: their attempt, and the values of their redelivery headers."""

    ranges: Ranges
    attempt: int
    first_delivery: datetime | None
    last_error: str | None


Source = tuple[str, int, int]
"""A table of the log, its first offset, and the one after its last."""


def reads_of(sources: Sequence[Source], ranges: Ranges) -> list[tuple[str, str]]:
    """The reads for these ranges of offsets: each source that has some, with its part of them as a multirange."""
    found = []
    for source, first, last in sources:
        cut = [f"[{max(a, first)},{min(b, last)})" for a, b in ranges if a < last and b > first]
        if cut:
            found.append((source, "{" + ",".join(cut) + "}"))
    return found


@dataclass(frozen=True)
class TaskClaim:
    """A claim for its tasks: database, group and number. To read and to record notes they need no epoch."""

    url: str = field(repr=False)
    group_id: int
    number: int

    def _call(self, function: str, **arguments: object) -> list[Row]:
        return staging.call(self.url, function, group_id=self.group_id, claim=self.number, **arguments)

    def reads(self, partition: int) -> list[Source]:
        """The tables with the claim's messages of a partition."""
        return [(source, first, last) for source, first, last in self._call("claim_reads", partition=partition)]

    def ranges(self, partition: int) -> Ranges:
        """The claimed ranges of a partition; empty if the claim is not in flight."""
        return next((ranges_of(ranges) for found, ranges, _ in self._call("claimed") if found == partition), ())

    def left(self, partition: int) -> float | None:
        """Seconds until the leases of a partition expire; None if they no longer hold any message of it."""
        left: float | None = self._call("claim_left", partition=partition)[0][0]
        return left

    def attempts(self, partition: int) -> list[Attempts]:
        """The claim's messages of a partition that were delivered before."""
        rows = self._call("claim_attempts", partition=partition)
        return [Attempts(ranges_of(ranges), attempt, first, error) for ranges, attempt, first, error in rows]

    def note_malformed(self, found: Sequence[tuple[int, int, str]]) -> None:
        """Records messages that do not fit the pipeline's schema: (partition, offset, error) of each."""
        self._call(
            "note_malformed",
            partitions=[partition for partition, _, _ in found],
            offsets=[offset for _, offset, _ in found],
            errors=[error for _, _, error in found],
        )

    def suspected(self) -> list[tuple[int, int, int]]:
        """(partition, offset, number of messages from there) of what ran when an attempt of the claim died."""
        return [(partition, offset, size) for partition, offset, size in self._call("suspected")]

    def note_suspect(self, attempt: int, partition: int, offset: int, size: int) -> None:
        """Records what a careful attempt is about to run; size 0 means that the attempt has finished."""
        self._call("note_suspect", attempt=attempt, partition=partition, offset=offset, size=size)

    def note_overdue(self, partition: int, offset: int, seconds: float | None, *, stopped: bool) -> None:
        """Records how long a handler has been running on this message (None: no longer); `stopped`: its process is
        being killed for it."""
        self._call("note_overdue", partition=partition, offset=offset, seconds=seconds, stopped=stopped)

    def overdue(self) -> list[Overdue]:
        """The messages of the claim that have been running for long, the longest first."""
        return [Overdue(*row) for row in self._call("overdue")]

    def stage(self) -> Stage:
        """A stage for the outputs of one attempt of a task."""
        return Stage(self.url, stage_of(self.group_id, self.number))


class Holding:
    """Whether the claim still holds its messages of a partition. Asks the database when the leases may have expired:
    the driver may have renewed them, or lost them."""

    def __init__(self, claim: TaskClaim) -> None:
        self._claim = claim
        self._until: dict[int, float] = {}

    def __call__(self, partition: int) -> bool:
        return elapsed() < self._until.get(partition, 0.0) or self._ask(partition)

    def _ask(self, partition: int) -> bool:
        sent = elapsed()
        left = self._claim.left(partition)
        self._until[partition] = 0.0 if left is None else holds_until(sent, left)
        return left is not None and elapsed() < self._until[partition]


@dataclass(slots=True)
class _Place:
    """The messages of an attempt for a partition of a topic, and the source of each."""

    messages: list[Encoded] = field(default_factory=list)
    sources: list[tuple[int, int]] = field(default_factory=list)


class Stage:
    """The outputs of one attempt of a task. `write` writes all of them at once."""

    def __init__(self, url: str, name: str) -> None:
        self._url, self._name = url, name
        # a random number for each attempt, because Spark's own numbers start again with every driver
        self.attempt = secrets.randbits(62)
        self._places: dict[tuple[int, int, int], _Place] = {}

    def add(self, topic: Sink, partition: int, source: tuple[int, int], message: Encoded, waits: bool = False) -> None:
        """Adds one message for a partition of a topic, made from that source offset.

        Delayed messages are counted separately, under the negative id, because they get no offset at the commit.
        """
        named = (-topic[0] if waits else topic[0], partition, topic[1])
        place = self._places.get(named)
        if place is None:
            place = self._places[named] = _Place()
        place.messages.append(message)
        place.sources.append(source)

    def write(self) -> list[StagedCount]:
        """Writes all outputs in one transaction, and returns their counts by topic and partition."""
        staged = staging.Staged()
        for (topic, partition, _), place in self._places.items():
            found = batches(place.messages, place.sources) if topic > 0 else None
            if found is None:
                staged.rows += staging.rows_of(self.attempt, topic, partition, place.sources, place.messages)
            else:
                staged.batches += [(topic, partition, batch) for batch in found]
        staging.write(self._url, self._name, self.attempt, staged)
        return [
            StagedCount(self.attempt, topic, partition, len(place.messages), of)
            for (topic, partition, of), place in self._places.items()
        ]
