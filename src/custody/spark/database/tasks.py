"""What the tasks of a pipeline do in the database, over the one connection that an executor's Python process keeps."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from custody.elapsed import elapsed, holds_until
from custody.store import staging
from custody.store.append import row_tail
from custody.store.postgres import Row
from custody.verbs.pipelines import Overdue, Placed, Ranges, Sink, ranges_of, stage_of


class Attempts(NamedTuple):
    """Messages that were delivered before: their attempt, and what the headers say of it."""

    ranges: Ranges
    attempt: int
    first_delivery: datetime | None
    last_error: str | None


Source = tuple[str, int, int]
"""Where messages are: the source, its first offset, and the one after its last."""


def reads_of(sources: Sequence[Source], ranges: Ranges) -> list[tuple[str, str]]:
    """What to read for these ranges of offsets: each source that has some, with its part of them as a multirange."""
    found = []
    for source, first, last in sources:
        cut = [f"[{max(a, first)},{min(b, last)})" for a, b in ranges if a < last and b > first]
        if cut:
            found.append((source, "{" + ",".join(cut) + "}"))
    return found


@dataclass(frozen=True)
class TaskClaim:
    """A claim as its tasks know it: by the database, the group and its number. They need no epoch to read and note."""

    url: str = field(repr=False)
    group_id: int
    number: int

    def _call(self, function: str, **arguments: object) -> list[Row]:
        return staging.call(self.url, function, group_id=self.group_id, claim=self.number, **arguments)

    def reads(self, partition: int) -> list[Source]:
        """Where the claim's messages of a partition are."""
        return [(source, first, last) for source, first, last in self._call("claim_reads", partition=partition)]

    def ranges(self, partition: int) -> Ranges:
        """What the claim took of a partition; empty if the claim is not in flight."""
        return next((ranges_of(ranges) for found, ranges, _ in self._call("claimed") if found == partition), ())

    def left(self, partition: int) -> float | None:
        """Seconds until the leases of a partition run out; None if they hold nothing of it any more."""
        left: float | None = self._call("claim_left", partition=partition)[0][0]
        return left

    def attempts(self, partition: int) -> list[Attempts]:
        """The claim's messages of a partition that are not at their first attempt."""
        rows = self._call("claim_attempts", partition=partition)
        return [Attempts(ranges_of(ranges), attempt, first, error) for ranges, attempt, first, error in rows]

    def note_malformed(self, found: Sequence[tuple[int, int, str]]) -> None:
        """Messages that do not fit the pipeline's schema: (partition, offset, error) of each."""
        self._call(
            "note_malformed",
            partitions=[partition for partition, _, _ in found],
            offsets=[offset for _, offset, _ in found],
            errors=[error for _, _, error in found],
        )

    def suspected(self) -> list[tuple[int, int, int]]:
        """(partition, offset, messages from there on) of what was running when an attempt of the claim died."""
        return [(partition, offset, size) for partition, offset, size in self._call("suspected")]

    def note_suspect(self, attempt: int, partition: int, offset: int, size: int) -> None:
        """What a careful attempt is about to run; size 0 says that it has come to its end."""
        self._call("note_suspect", attempt=attempt, partition=partition, offset=offset, size=size)

    def note_overdue(self, partition: int, offset: int, seconds: float | None, *, stopped: bool) -> None:
        """A handler has been running for so long on this message (None: it does no more); `stopped`: its process is
        killed for it now."""
        self._call("note_overdue", partition=partition, offset=offset, seconds=seconds, stopped=stopped)

    def overdue(self) -> list[Overdue]:
        """The messages of the claim that have been running for long, the longest first."""
        return [Overdue(*row) for row in self._call("overdue")]

    def stage(self) -> Stage:
        """For the outputs of one attempt of a task."""
        return Stage(self.url, stage_of(self.group_id, self.number))


class Holding:
    """Whether the claim still holds its messages of a partition. The database is asked when that is not sure any more:
    the driver may have renewed the leases, or may have lost them."""

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


class Stage:
    """What one attempt of a task has to publish. Nothing of it is written before `write`, and then all of it."""

    def __init__(self, url: str, name: str) -> None:
        self._url, self._name = url, name
        # a number for each attempt: Spark's own start again with every driver
        self.attempt = secrets.randbits(62)
        self._rows: list[bytes] = []
        self._counts: dict[tuple[int, int, int], int] = {}

    def add(
        self,
        topic: Sink,
        partition: int,
        source: tuple[int, int],
        message: tuple[str | None, bytes, bytes, bytes | None],
        waits: bool = False,
    ) -> None:
        """One message for a partition of a topic, from that source offset.

        One that waits for its time is counted by itself, under the negative id: it gets no offset at the commit.
        """
        topic_id = -topic[0] if waits else topic[0]
        place = (topic_id, partition, topic[1])
        n = self._counts.get(place, 0)
        self._counts[place] = n + 1
        self._rows.append(
            staging.stage_row(self.attempt, topic_id, partition, n, source[0], source[1], row_tail(*message))
        )

    def write(self) -> list[Placed]:
        """Writes it all in one transaction, and says what is where."""
        if self._rows:
            staging.copy_staged(self._url, self._name, self._rows)
        return [
            Placed(self.attempt, topic, partition, count, of)
            for (topic, partition, of), count in self._counts.items()
            if count
        ]
