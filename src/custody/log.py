"""The log: topics, publishing, reading by offset or time. What the lifecycle needs of it is append, read and tail."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from custody import lanes
from custody.errors import Busy, InvalidArgument, InvalidPayload, key_too_long
from custody.model import KEY_BYTES, Message, Outgoing, Payload, Receipt, Topic
from custody.policy import Duration, interval
from custody.retention import Retention
from custody.routing import ROUTING_KEY, require_routing_key
from custody.store.append import copy_rows, row_tail
from custody.store.postgres import Connection, Database, Row

COPY_FROM = 64
"""From this many messages on a batch goes in by COPY: three more round trips, but cheaper for each row."""

_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode


@lru_cache(maxsize=65536)
def partition_for(key: str, partitions: int) -> int:
    """The partition of a key: the first eight bytes of its SHA-256, without the sign bit, modulo the partitions."""
    digest = hashlib.sha256(key.encode()).digest()
    return (int.from_bytes(digest[:8], "big") & 0x7FFF_FFFF_FFFF_FFFF) % partitions


def encode(payload: Payload) -> tuple[bytes, bytes]:
    """The kind and the bytes of a payload. Refuses what would come back as something else: NaN, tuples, datetimes …"""
    if type(payload) is bytes:
        return b"b", payload
    if type(payload) is msgspec.Raw:
        return _encode_raw(bytes(payload))
    if isinstance(payload, bytes | bytearray | memoryview):
        return b"b", bytes(payload)
    try:
        if isinstance(payload, str):
            return b"t", payload.encode()
        data = _encode_json(payload)
        if _decode_json(data) == payload:
            return b"j", data
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidPayload(
            f"the payload cannot be stored: {error}", "Give bytes, text, or a plain JSON value."
        ) from error
    raise InvalidPayload(
        "the payload would not come back as it went in",
        "JSON knows dicts with text keys, lists, text, finite numbers, booleans and None. Convert all else.",
    )


def _encode_raw(document: bytes) -> tuple[bytes, bytes]:
    """A JSON document as it came: it is stored letter for letter, once it is known to be one. A text is a text."""
    try:
        value = _decode_json(document)
        return (b"t", value.encode()) if isinstance(value, str) else (b"j", document)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidPayload(f"the payload is not JSON: {error}") from error


def decode_raw(kind: str, data: bytes) -> Payload:
    """As `decode`, but JSON stays what it is, for whoever passes it on."""
    return msgspec.Raw(data) if kind == "j" else decode(kind, data)


def decode(kind: str, data: bytes) -> Payload:
    if kind == "j":
        return _decode_json(data)
    return data if kind == "b" else data.decode()


Decoding = Callable[[str, bytes], Payload]
"""How the kind and the bytes of a payload become one."""


def encode_headers(headers: Mapping[str, str] | None) -> bytes | None:
    if not headers:
        return None
    pairs: Iterable[tuple[object, object]] = headers.items()
    for name, value in pairs:
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidPayload(
                f"header {name!r} is {value!r}", "Headers are text by name; convert the value to text."
            )
        if "\0" in name or "\0" in value:
            raise InvalidPayload(
                f"header {name!r} has a NUL character", "Remove it, or put the value into the payload."
            )
        _refuse_surrogates(f"header {name!r}", name + value)
        if name == ROUTING_KEY:
            require_routing_key(value)
    return _encode_json(dict(headers))


def _refuse_surrogates(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidPayload(
            f"{what} has half a surrogate pair, which is no character", "Decode the text with the right encoding."
        ) from None


Encoded = tuple[str | None, bytes, bytes, bytes | None]
"""key, kind, payload, headers (JSON) of one message."""


def require_key(key: str | None) -> None:
    """Refuses a key that could not be stored."""
    if key is not None:
        if not isinstance(key, str):
            raise InvalidPayload(f"a key is text, not {key!r}", "Convert it, for example with str().")
        if "\0" in key:
            raise InvalidPayload("a key cannot have a NUL character", "Remove it, or encode the key, say as base64.")
        _refuse_surrogates("the key", key)
        if len(key.encode()) > KEY_BYTES:
            raise key_too_long()


def encode_message(message: Outgoing) -> Encoded:
    key = message.key
    require_key(key)
    kind, payload = encode(message.payload)
    if message.routing_key is not None:
        require_routing_key(message.routing_key)
        return key, kind, payload, encode_headers({**(message.headers or {}), ROUTING_KEY: message.routing_key})
    return key, kind, payload, encode_headers(message.headers)


def create_topic(
    db: Database,
    name: str,
    *,
    partitions: int,
    max_depth: int | None,
    priorities: bool,
    starvation_limit: Duration | None,
    retention: Retention | None = None,
    now: datetime | None,
) -> None:
    limit = interval(starvation_limit)
    with db.transaction() as connection:
        db.call(
            "create_topic",
            on=connection,
            topic=name,
            partitions=partitions,
            max_depth=max_depth,
            priorities=priorities,
            starvation_limit=limit,
            now=now,
        )
        if retention is not None:
            db.call("set_retention", on=connection, topic=name, **retention.columns())


def grow_topic(db: Database, name: str, *, partitions: int, now: datetime | None) -> None:
    db.call("grow_topic", topic=name, partitions=partitions, now=now)


def delete_topic(db: Database, name: str) -> None:
    db.call("delete_topic", topic=name)


def _bounds(db: Database, topic: str) -> list[Row]:
    for _ in range(3):
        try:
            return db.call("partitions", topic=topic)
        except Busy:  # the segment that it looked into was sealed and dropped at that moment
            continue
    return db.call("partitions", topic=topic)


def describe_topic(db: Database, row: Mapping[str, Any]) -> Topic:
    bounds = _bounds(db, row["name"])
    return Topic(
        name=row["name"],
        partitions=row["partitions"],
        max_depth=row["max_depth"],
        created_at=row["created_at"],
        first_offsets=tuple(first for _, first, _ in bounds),
        tails=tuple(tail for _, _, tail in bounds),
        starvation_limit=row["starvation_limit"],
        retention=Retention.from_columns(row),
    )


def topics(db: Database) -> list[Topic]:
    return [describe_topic(db, row) for row in db.select("topics", order=["name"])]


def topic(db: Database, name: str) -> Topic:
    return describe_topic(db, db.call_dicts("topic_named", topic=name)[0])


class Layout(NamedTuple):
    """What one has to know of a topic to place messages in it: its partitions, and whether they are lanes."""

    partitions: int
    priorities: bool = False

    def place_key(self, key: str, priority: lanes.Priority | None = None) -> int:
        """The partition of a key."""
        if self.priorities:
            return partition_for(key, self.partitions // lanes.LANES) * lanes.LANES + lanes.lane_of(priority)
        if priority is not None:
            lanes.require_none(priority)
        return partition_for(key, self.partitions)

    def place_turn(self, turn: int, priority: lanes.Priority | None = None) -> int:
        """A partition for a message without a key: one after the other."""
        if self.priorities:
            return turn % (self.partitions // lanes.LANES) * lanes.LANES + lanes.lane_of(priority)
        if priority is not None:
            lanes.require_none(priority)
        return turn % self.partitions

    def require(self, partition: int, priority: lanes.Priority | None) -> None:
        """Refuses a priority beside a partition that is not of it."""
        if self.priorities:
            lanes.require_lane(priority, partition)
        elif priority is not None:
            lanes.require_none(priority)


def layout(db: Database, name: str) -> Layout:
    _, partitions, priorities = db.call("layout", topic=name)[0]
    return Layout(partitions, priorities)


def place(messages: Sequence[Outgoing], layout: Layout) -> list[int]:
    """A partition for each message: the named one, the key's, or else one after the other from a random start."""
    turn = random.randrange(layout.partitions)
    placed = []
    for message in messages:
        if message.partition is not None:
            layout.require(message.partition, message.priority)
            placed.append(message.partition)
        elif message.key is not None:
            placed.append(layout.place_key(message.key, message.priority))
        else:
            placed.append(layout.place_turn(turn, message.priority))
            turn += 1
    return placed


def arrays(encoded: Sequence[Encoded]) -> dict[str, Any]:
    """The columns of many messages, as the functions take them."""
    return {
        "keys": [key for key, _, _, _ in encoded],
        "kinds": [kind.decode() for _, kind, _, _ in encoded],
        "payloads": [payload for _, _, payload, _ in encoded],
        "headers": [None if headers is None else headers.decode() for _, _, _, headers in encoded],
    }


def publish(
    db: Database,
    topic: str,
    messages: Sequence[Outgoing],
    *,
    layout: Layout,
    producer: tuple[str, int, int] | None = None,
    expected_offset: int | None = None,
    now: datetime | None = None,
) -> list[Receipt]:
    """Appends the messages in one transaction, in the order given for each partition. All of them or none."""
    if not messages:
        return []
    if producer is None and len(messages) >= COPY_FROM:
        # encoded before the partitions are taken: they are held for as short a time as possible
        tails = [row_tail(*encode_message(message)) for message in messages]
        placed = place(messages, layout)
        with db.transaction() as connection:
            offsets = _copy(db, connection, topic, tails, placed, layout, expected_offset, now)
        return [Receipt(topic, partition, offset) for partition, offset in zip(placed, offsets, strict=True)]
    encoded = [encode_message(message) for message in messages]
    placed = place(messages, layout)
    producer_id, epoch, sequence = producer or (None, None, None)
    rows = db.call(
        "publish",
        topic=topic,
        partitions=placed,
        **arrays(encoded),
        producer=producer_id,
        epoch=epoch,
        sequence=sequence,
        expected=expected_offset,
        now=now,
        of=layout.partitions,
        priorities=layout.priorities,
    )
    return [Receipt(topic, partition, offset, duplicate) for partition, offset, duplicate in rows]


def _copy(
    db: Database,
    connection: Connection,
    topic: str,
    tails: list[bytes],
    placed: list[int],
    layout: Layout,
    expected_offset: int | None,
    now: datetime | None,
) -> Sequence[int]:
    wanted = sorted(set(placed))
    counts = [placed.count(partition) for partition in wanted]
    reserved = db.call(
        "reserve",
        on=connection,
        topic=topic,
        partitions=wanted,
        counts=counts,
        expected=expected_offset,
        now=now,
        of=layout.partitions,
        priorities=layout.priorities,
    )
    segment_id = reserved[0][2]
    times = {partition: published_at for partition, _, _, published_at in reserved}
    following = {partition: offset for partition, offset, _, _ in reserved}
    offsets: Sequence[int]
    if len(wanted) == 1:
        first = following[placed[0]]
        offsets = range(first, first + len(placed))
    else:
        offsets = numbered = []
        for partition in placed:
            numbered.append(following[partition])
            following[partition] += 1
    copy_rows(connection, segment_id, tails, placed, offsets, times)
    return offsets


def read(
    db: Database,
    topic: str,
    partition: int,
    *,
    offset: int | None,
    max_messages: int,
    priorities: bool = False,
    decoding: Decoding = decode,
) -> list[Message]:
    """Messages of a partition from an offset on, as they are in the log."""
    bounds: dict[str, Any] = {"from": offset, "max": max_messages}
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
            priority=lanes.priority_of(partition) if priorities else None,
        )
        for row in rows
    ]


def offset_at(db: Database, topic: str, partition: int, time: datetime) -> int:
    """The first offset of a partition that was published at that time or later."""
    require_zone(time)
    return int(db.call("offset_for_time", topic=topic, partition=partition, time=time)[0][0])


def require_zone(time: datetime | None) -> None:
    """Refuses a time that means another moment on every machine."""
    if time is not None and time.tzinfo is None:
        raise InvalidArgument(f"the time {time} has no time zone", "Use datetime.now(UTC) or the like.")
