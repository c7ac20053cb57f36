"""From the outbox into the topics of the same database."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from custody.store.postgres import Database


def move(db: Database, now: datetime | None, go_on: Callable[[], bool] = lambda: True) -> int:
    """Moves due events into the topics that they are meant for, and wakes who waits there. Returns how many.

    Those of a topic that is gone are dead, and not counted. `go_on` is asked before each partition.
    """
    moved = 0
    topics = set()
    for _, topic_id, partition in db.call("outbox_partitions"):
        if not go_on():
            break
        count = int(db.call("move_outbox", topic_id=topic_id, partition=partition, now=now)[0][0])
        if count:
            moved += count
            topics.add(topic_id)
    if topics:
        db.call("hint", topics=sorted(topics))
    return moved
