"""What an operator does: redrive, discard, replay, rewind, release a key, skip a message."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from custody.bounds import require, require_each
from custody.errors import Busy, InvalidArgument
from custody.model import Replayed, Rewound
from custody.policy import require_zone
from custody.store.postgres import Database, Row

PATIENCE = 5.0
"""For so many seconds a rewind is tried while somebody has a lease locked that it takes something from."""


@dataclass(frozen=True, kw_only=True)
class DeadFilter:
    """Which dead messages: all conditions that are given must hold. `where_error` is a LIKE pattern."""

    where_error: str | None = None
    key: str | None = None
    partition: int | None = None
    offsets: Sequence[int] | None = None
    died_from: datetime | None = None
    died_until: datetime | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.partition is not None:
            require("partition", self.partition)
        if self.offsets is not None:
            require_each("offsets", self.offsets)
        if self.limit is not None:
            require("limit", self.limit)
        if self.limit is not None and self.limit < 1:
            raise InvalidArgument("limit must be at least 1")
        if self.offsets is not None and self.partition is None:
            raise InvalidArgument("offsets need a partition", "Offsets repeat in each partition: say which one.")
        require_zone(self.died_from)
        require_zone(self.died_until)

    def row(self) -> Row:
        """As the SQL type `custody.dead_filter`."""
        offsets = None if self.offsets is None else list(self.offsets)
        return (self.where_error, self.key, self.partition, offsets, self.died_from, self.died_until, self.limit)


def settle_dead(
    db: Database,
    verb: Literal["redrive", "discard"],
    topic: str,
    group: str,
    which: DeadFilter,
    *,
    dry_run: bool,
    actor: str | None,
    reason: str | None,
    now: datetime | None,
) -> list[tuple[int, int]]:
    """Makes dead messages ready with a fresh budget, or gives them up for good. Returns (partition, offset) of each."""
    rows = db.call(
        verb, topic=topic, group=group, filter=which.row(), dry_run=dry_run, actor=actor, reason=reason, now=now
    )
    return [(partition, offset) for partition, offset in rows]


def replay(
    db: Database,
    dlq_topic: str,
    partition: int,
    offset: int,
    *,
    target: str | None,
    actor: str | None,
    reason: str | None,
    now: datetime | None,
    origin: str | None = None,
) -> Replayed:
    """Publishes a copy of a dead-letter topic as the message that it was, once. `origin`: only if it names this topic
    as its own."""
    row = db.call(
        "replay_dead_letter",
        dlq_topic=dlq_topic,
        partition=partition,
        offset=offset,
        target=target,
        actor=actor,
        reason=reason,
        now=now,
        origin=origin,
    )[0]
    return Replayed(*row)


def dead_letter_origin(db: Database, dlq_topic: str, partition: int, offset: int) -> tuple[str | None, str | None]:
    """Which topic a copy names as its own, None if it was replayed and is gone; and where it was replayed to."""
    origin, replayed_to = db.call("dead_letter_origin", dlq_topic=dlq_topic, partition=partition, offset=offset)[0]
    return origin, replayed_to


def rewind(
    db: Database,
    topic: str,
    group: str,
    *,
    to_offset: int | None,
    to_time: datetime | None,
    partition: int | None,
    dry_run: bool,
    actor: str | None,
    reason: str | None,
    now: datetime | None,
) -> list[Rewound]:
    """Tried again for a while if it is busy: each try gives up soon, so that claims go on between them."""
    require_zone(to_time)
    until, pause = time.monotonic() + PATIENCE, 0.05
    while True:
        try:
            rows = db.call(
                "rewind",
                topic=topic,
                group=group,
                to_offset=to_offset,
                to_time=to_time,
                partition=partition,
                dry_run=dry_run,
                actor=actor,
                reason=reason,
                now=now,
            )
        except Busy:
            if time.monotonic() + pause > until:
                raise
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        else:
            return [Rewound(partition=at, target=target, messages=messages) for at, target, messages in rows]


def release_key(
    db: Database, topic: str, group: str, key: str, *, actor: str | None, reason: str | None, now: datetime | None
) -> int:
    """Lets a key go on past its held dead messages. Returns how many there were."""
    return int(db.call("release_key", topic=topic, group=group, key=key, actor=actor, reason=reason, now=now)[0][0])


def skip(
    db: Database,
    topic: str,
    group: str,
    partition: int,
    offset: int,
    *,
    actor: str | None,
    reason: str | None,
    now: datetime | None,
) -> None:
    db.call("skip", topic=topic, group=group, partition=partition, offset=offset, actor=actor, reason=reason, now=now)
