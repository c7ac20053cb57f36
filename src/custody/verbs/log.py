"""The log: publish, and read by offset or time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Any

from custody.model.codec import Decoding, Encoded, decode, encode_message
from custody.model.entities import Message, Outgoing, Receipt
from custody.model.placement import Layout, place
from custody.model.policy import require_zone
from custody.model.slices import one_by_one
from custody.store import packed
from custody.store.log_copy import copy_rows, row_tail
from custody.store.postgres import Connection, Database

BATCH_FROM, BATCH_BYTES = 16, 1000
"""From so many messages on, with less than so many bytes each, they are joined: they become batches of the log."""
COPY_FROM = 2000
"""From so many larger messages on they are written by COPY: three more round trips, but a row costs less."""
MOST = 10_000
"""More messages than this are sent in several calls."""


def publish(
    db: Database,
    topic: str,
    messages: Sequence[Outgoing],
    *,
    layout: Layout,
    producer: tuple[str, int, int] | None = None,
    expected_offset: int | None = None,
) -> list[Receipt]:
    """Appends the messages in one transaction, in this order within each partition: all or none."""
    if not messages:
        return []
    encoded = [encode_message(message) for message in messages]
    placed = place(messages, layout)
    if producer is not None:
        producer_id, epoch, sequence = producer
        rows = db.call(
            "publish",
            topic=topic,
            partitions=placed,
            **packed.columns(encoded),
            producer=producer_id,
            epoch=epoch,
            sequence=sequence,
            expected=expected_offset,
            of=layout.partitions,
            priorities=layout.priorities,
        )
        return [Receipt(topic, partition, offset, duplicate) for partition, offset, duplicate in rows]
    offsets = append(db, topic, encoded, placed, layout=layout, expected_offset=expected_offset)
    return [Receipt(topic, partition, offset) for partition, offset in zip(placed, offsets, strict=True)]


def append(
    db: Database,
    topic: str,
    encoded: Sequence[Encoded],
    placed: Sequence[int],
    *,
    layout: Layout,
    expected_offset: int | None,
) -> Sequence[int]:
    """Appends messages to the partitions in `placed`. Returns the offset of each."""
    small = sum(len(message[2]) for message in encoded) < BATCH_BYTES * len(encoded)
    if len(encoded) >= COPY_FROM and not small:
        return _copy(db, topic, encoded, placed, layout=layout, expected_offset=expected_offset)
    columns = packed.joined_columns if small and len(encoded) >= BATCH_FROM else packed.columns

    def send(
        some: Sequence[Encoded], places: Sequence[int], expected: int | None, on: Connection | None
    ) -> Sequence[int]:
        """Sends messages that lie together by partition."""
        counts = Counter(places)
        ((firsts,),) = db.call(
            "append",
            on=on,
            topic=topic,
            partitions=packed.integers(counts),
            counts=packed.integers(counts.values()),
            **columns(some),
            expected=expected,
            of=layout.partitions,
            priorities=layout.priorities,
        )
        return _number(places, dict(zip(counts, firsts, strict=True)))

    # a stable sort: the order within a partition stays
    order = sorted(range(len(placed)), key=placed.__getitem__) if len(set(placed)) > 1 else range(len(placed))
    if isinstance(order, list):
        encoded, placed = [encoded[n] for n in order], [placed[n] for n in order]
    offsets: Sequence[int]
    if len(encoded) <= MOST:
        offsets = send(encoded, placed, expected_offset, None)
    else:
        parts: list[int] = []
        offsets = parts
        with db.transaction() as connection:
            for start in range(0, len(encoded), MOST):
                some = slice(start, start + MOST)
                expected = None if expected_offset is None else expected_offset + start
                parts += send(encoded[some], placed[some], expected, connection)
    if isinstance(order, range):
        return offsets
    found = [0] * len(offsets)
    for n, offset in zip(order, offsets, strict=True):
        found[n] = offset
    return found


def _copy(
    db: Database,
    topic: str,
    encoded: Sequence[Encoded],
    placed: Sequence[int],
    *,
    layout: Layout,
    expected_offset: int | None,
) -> Sequence[int]:
    # encoded before the partitions are locked, to hold the locks for a short time
    tails = [row_tail(*message) for message in encoded]
    counted = Counter(placed)
    with db.transaction() as connection:
        reserved = db.call(
            "reserve",
            on=connection,
            topic=topic,
            partitions=sorted(counted),
            counts=[counted[partition] for partition in sorted(counted)],
            expected=expected_offset,
            of=layout.partitions,
            priorities=layout.priorities,
        )
        segment_id = reserved[0][2]
        times = {partition: published_at for partition, _, _, published_at in reserved}
        offsets = _number(placed, {partition: offset for partition, offset, _, _ in reserved})
        copy_rows(connection, segment_id, tails, placed, offsets, times)
    return offsets


def _number(placed: Sequence[int], firsts: Mapping[int, int]) -> Sequence[int]:
    """The offset of each message, counted from the first one of its partition."""
    if len(firsts) == 1:
        first = firsts[placed[0]]
        return range(first, first + len(placed))
    following = dict(firsts)
    offsets = []
    for partition in placed:
        offsets.append(following[partition])
        following[partition] += 1
    return offsets


def read(
    db: Database,
    topic: str,
    partition: int,
    *,
    offset: int | None,
    max_messages: int,
    max_bytes: int | None = None,
    decoding: Decoding = decode,
) -> list[Message]:
    """Reads messages of a partition from an offset on. The list ends with the message that reaches `max_bytes` of
    payload."""
    bounds: dict[str, Any] = {"from": offset, "max": max_messages, "bytes": max_bytes}
    rows = db.call("read", topic=topic, partition=partition, slices=True, **bounds)
    found = [
        Message(
            topic=topic,
            partition=partition,
            offset=number,
            key=key,
            payload=decoding(kind, payload),
            headers=headers or {},
            attempt=0,
            published_at=row[1],
            priority=row[6],
            topic_uid=row[7],
        )
        for row in rows
        for number, key, kind, payload, headers in one_by_one(row[0], *row[2:6], *row[8:])
    ]
    found.sort(key=attrgetter("offset"))
    return found


def offset_at(db: Database, topic: str, partition: int, time: datetime) -> int:
    """The first offset of a partition that was published at or after that time."""
    require_zone(time)
    return int(db.call("offset_for_time", topic=topic, partition=partition, time=time)[0][0])
