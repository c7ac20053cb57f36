"""The streaming source of a pipeline. Spark's offset is the number of a claim, so a replay reads the same messages.

It yields references (claim, partition, offset). Payloads do not pass through Spark's memory here: the task that handles
a message reads it in its own process.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import cache
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import custody
from custody.spark.database import arrow
from custody.spark.database.tasks import TaskClaim, reads_of
from custody.spark.driver.pacing import Pace
from custody.spark.driver.splitting import Piece, shares
from custody.verbs.pipelines import Driver, PassLimit

SCHEMA = "_claim bigint, _partition int, _offset bigint, _share int, _of int"
_ARROW = pa.schema(
    [("_claim", pa.int64()), ("_partition", pa.int32()), ("_offset", pa.int64()),
     ("_share", pa.int32()), ("_of", pa.int32())]
)  # fmt: skip
IDLE = 1.0
"""Seconds between two claims while a group has no messages to deliver."""


class ClaimOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the source, passed as the option `claims`."""

    topic: str
    group: str
    group_id: int
    epoch: int
    driver: str
    visibility: float
    max_messages: int
    batch_time: float
    """Target duration of a batch in seconds, which determines the size of claims."""
    tasks: int
    ordered: bool
    until: tuple[int, ...] | None = None
    """Given for one pass: its end offset on each partition."""
    due: datetime | None = None
    give_up_at: float | None = None
    """Until when a pass waits for retries (seconds since 1970); None if it does not wait."""

    def encoded(self) -> str:
        return msgspec.json.encode(self).decode()

    @property
    def as_driver(self) -> Driver:
        return Driver(
            topic=self.topic,
            group=self.group,
            group_id=self.group_id,
            epoch=self.epoch,
            name=self.driver,
            visibility=self.visibility,
        )


class Share(InputPartition):
    """The part of a claim that one task reads."""

    def __init__(self, claim: int, pieces: list[Piece]) -> None:
        super().__init__(claim)
        self.pieces = pieces


class ClaimSource(DataSource):
    """The source of a pipeline's query. It is a separate format, because only a pipeline can use it."""

    @classmethod
    def name(cls) -> str:
        return "custody_claims"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002
        return GroupReader(self.options)


def own_source(name: str) -> type[ClaimSource]:
    """The source under a unique name, because one registration is not safe for two queries that start concurrently.

    Both would write to one Java map, which no task could read afterwards.
    """
    return type("OwnClaimSource", (ClaimSource,), {"name": classmethod(lambda _: name)})


class GroupReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Claims in `latestOffset`. Spark runs it in a separate process beside the driver. It needs no state of its own."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._url = arrow.locate(options.get("url"))
        self._claims = msgspec.json.decode(options["claims"], type=ClaimOptions)
        self._reported: tuple[int, dict[str, Any]] | None = None
        self._last = 0
        self._pace = Pace(most=self._claims.max_messages, aim=self._claims.batch_time, tasks=max(1, self._claims.tasks))
        self._running: tuple[int, float] | None = None

    def initialOffset(self) -> dict[str, int]:
        return {"claim": 0}

    def prepareForTriggerAvailableNow(self) -> None:
        """Does nothing: the end of the pass came with the options."""

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: ARG002
        """The claim in flight, or a new one; `start` if there is nothing to claim. Runs in the source's process.

        It waits here, because Spark would ask again at once. In a pass it waits for retries as long as allowed.
        """
        claims = self._claims
        only = None if claims.until is None else PassLimit(until=claims.until, due=claims.due)
        c, woken = _open(self._url, claims.topic)
        drive = c.driver_verbs(claims.as_driver)
        if self._running is not None:
            messages, since = self._running
            self._pace.took(messages, time.monotonic() - since)
            self._running = None
        began = time.monotonic()
        while True:
            woken.clear()
            claim = drive.claim(self._pace.size, only)
            if claim.number is not None and claim.number == start["claim"]:
                drive.release()  # a kept checkpoint counts it as done, so it would never run
                continue
            if claim.number is not None:
                self._last, self._running = claim.number, (claim.messages, time.monotonic())
                return {"claim": claim.number}
            if claim.reason == "passed" and (only is not None or time.monotonic() - began < IDLE):
                continue  # no bound message among those scanned; claim again
            if only is None:
                if claim.reason != "passed":
                    woken.wait(min(IDLE, IDLE if claim.due_in is None else max(0.01, claim.due_in)))
                return start
            pause = _pause(claims.give_up_at, claim.reason, claim.due_in)
            if pause is None:
                return start
            time.sleep(pause)

    def reportLatestOffset(self) -> dict[str, Any]:
        """The figures of the group, for Spark's listener, queried after each claim. Runs in the source's process."""
        if self._reported is None or self._reported[0] != self._last:
            c, _ = _open(self._url, self._claims.topic)
            figures = asdict(c.figures(self._claims.topic, self._claims.group))
            last = figures.pop("last")
            self._reported = (self._last, {**figures, **({} if last is None else {"last": last})})
        return self._reported[1]

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:  # noqa: ARG002
        """Empty for a claim that is not in flight: it was committed before. Runs in the source's process."""
        number = end["claim"]
        c, _ = _open(self._url, self._claims.topic)
        parts = c.driver_verbs(self._claims.as_driver).claimed(number)
        return [Share(number, pieces) for pieces in shares(parts, self._claims.tasks, ordered=self._claims.ordered)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in an executor."""
        assert isinstance(partition, Share)
        for piece in partition.pieces:
            if piece.of == 1:
                yield from _references(partition.value, piece)
                continue
            sources = TaskClaim(self._url, self._claims.group_id, partition.value).reads(piece.partition)
            for batch in arrow.offsets(self._url, reads_of(sources, piece.ranges), share=(piece.share, piece.of)):
                yield _batch(partition.value, piece, batch["offset"])


def _pause(give_up_at: float | None, reason: str | None, due_in: float | None) -> float | None:
    """Seconds until a pass claims again; None if there is nothing to wait for."""
    left = 0.0 if give_up_at is None else give_up_at - time.time()
    if left <= 0:
        return None
    if due_in is not None:
        return min(max(0.01, due_in), IDLE) if due_in < left else None
    return None if reason == "empty" else min(0.2, left)


def _references(claim: int, piece: Piece, size: int = 10_000) -> Iterator[pa.RecordBatch]:
    for first, last in piece.ranges:
        for begin in range(first, last, size):
            yield _batch(claim, piece, pa.array(range(begin, min(begin + size, last)), pa.int64()))


def _batch(claim: int, piece: Piece, offsets: pa.Array) -> pa.RecordBatch:
    count = len(offsets)
    return pa.RecordBatch.from_arrays(
        [
            pa.repeat(pa.scalar(claim, pa.int64()), count),
            pa.repeat(pa.scalar(piece.partition, pa.int32()), count),
            offsets,
            pa.repeat(pa.scalar(piece.share, pa.int32()), count),
            pa.repeat(pa.scalar(piece.of, pa.int32()), count),
        ],
        schema=_ARROW,
    )


def references(claim: int, messages: Sequence[tuple[int, int]]) -> pa.Table:
    """The rows that the source would yield for these messages (partition, offset), in the same order."""
    count = len(messages)
    return pa.table(
        [
            pa.repeat(pa.scalar(claim, pa.int64()), count),
            pa.array([partition for partition, _ in messages], pa.int32()),
            pa.array([offset for _, offset in messages], pa.int64()),
            pa.repeat(pa.scalar(0, pa.int32()), count),
            pa.repeat(pa.scalar(1, pa.int32()), count),
        ],
        schema=_ARROW,
    )


@cache
def _open(url: str, topic: str) -> tuple[custody.Custody, threading.Event]:
    """Custody for this process, and an event set by each publish to the topic. Open until the process exits."""
    c = custody.connect(url)
    atexit.register(c.close)
    woken = threading.Event()
    atexit.register(c.listen(topic, woken.set))
    return c, woken
