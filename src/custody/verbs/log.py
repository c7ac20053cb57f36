"""The log: publish, and read by offset or time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from custody.model.codec import Decoding, Encoded, decode, encode_message
from custody.model.entities import Message, Outgoing, Receipt
from custody.model.placement import Layout, place
from custody.model.policy import require_zone
from custody.store import packed
from custody.store.log_copy import copy_rows, row_tail
from custody.store.postgres import Database

COPY_FROM = 2000
"""Batches of at least this many messages are written by COPY: three more round trips, but a row costs less."""


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
    if len(encoded) >= COPY_FROM:
        return _copy(db, topic, encoded, placed, layout=layout, expected_offset=expected_offset)
    counted = Counter(placed)
    partitions = sorted(counted)
    if len(partitions) > 1:
        # a stable sort: the order within a partition stays
        encoded = [encoded[n] for n in sorted(range(len(placed)), key=placed.__getitem__)]
    ((firsts,),) = db.call(
        "append",
        topic=topic,
        partitions=packed.integers(partitions),
        counts=packed.integers([counted[partition] for partition in partitions]),
        **packed.columns(encoded),
        expected=expected_offset,
        of=layout.partitions,
        priorities=layout.priorities,
    )
    return _number(placed, dict(zip(partitions, firsts, strict=True)))


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
    rows = db.call("read", topic=topic, partition=partition, **bounds)
    return [
        Message(
            topic=topic,
            partition=partition,
            offset=row[0],
            key=row[2],
            payload=decoding(row[3], row[4]),
            headers=row[5] or {},
            attempt=0,
            published_at=row[1],
            priority=row[6],
            topic_uid=row[7],
        )
        for row in rows
    ]


def offset_at(db: Database, topic: str, partition: int, time: datetime) -> int:
    """The first offset of a partition that was published at or after that time."""
    require_zone(time)
    return int(db.call("offset_for_time", topic=topic, partition=partition, time=time)[0][0])
