"""Moves events of the outbox into topics of the same database."""

from __future__ import annotations

from collections.abc import Callable

from custody.store.postgres import Database


def move_to_topics(db: Database, go_on: Callable[[], bool] = lambda: True) -> int:
    """Moves due events into their topics, and wakes the consumers that wait there. Returns how many.

    Events of a deleted topic become DEAD, and are not counted. `go_on` is called before each partition; False ends it.
    """
    moved = 0
    topics = set()
    for _, topic_id, partition in db.call("outbox_partitions"):
        if not go_on():
            break
        count = int(db.call("move_outbox", topic_id=topic_id, partition=partition)[0][0])
        if count:
            moved += count
            topics.add(topic_id)
    if topics:
        db.call("hint", topics=sorted(topics))
    return moved
