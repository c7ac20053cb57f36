"""Topics: create, grow, delete and describe them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from custody.errors import Busy
from custody.model import Topic
from custody.placement import Layout
from custody.policy import Duration, interval
from custody.retention import Retention
from custody.store.postgres import Connection, Database, Row


def create(
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


def grow(db: Database, name: str, *, partitions: int, now: datetime | None, on: Connection | None = None) -> None:
    db.call("grow_topic", on=on, topic=name, partitions=partitions, now=now)


def delete(db: Database, name: str) -> None:
    db.call("delete_topic", topic=name)


def _bounds(db: Database, topic: str) -> list[Row]:
    for _ in range(3):
        try:
            return db.call("partitions", topic=topic)
        except Busy:  # the segment that it looked into was sealed and dropped at that moment
            continue
    return db.call("partitions", topic=topic)


def describe(db: Database, row: Mapping[str, Any]) -> Topic:
    bounds = _bounds(db, row["name"])
    return Topic(
        name=row["name"],
        uid=row["uid"],
        partitions=row["partitions"],
        max_depth=row["max_depth"],
        created_at=row["created_at"],
        first_offsets=tuple(first for _, first, _ in bounds),
        tails=tuple(tail for _, _, tail in bounds),
        starvation_limit=row["starvation_limit"],
        retention=Retention.from_columns(row),
    )


def every(db: Database) -> list[Topic]:
    return [describe(db, row) for row in db.select("topics", order=["name"])]


def named(db: Database, name: str) -> Topic:
    return describe(db, db.call_dicts("topic_named", topic=name)[0])


def layout(db: Database, name: str) -> Layout:
    _, partitions, priorities = db.call("layout", topic=name)[0]
    return Layout(partitions, priorities)
