"""Short ways to fill a topic and to look at what was delivered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from custody import Custody, Message, Outgoing, Policy

TOPIC, GROUP = "orders", "stock"


def fill(c: Custody, count: int, *, topic: str = TOPIC) -> None:
    """Publishes 0, 1, 2, … to partition 0, without keys."""
    c.publish_many(topic, [Outgoing(n, partition=0) for n in range(count)])


def keyed(c: Custody, keys: Iterable[str | None], *, topic: str = TOPIC) -> None:
    """Publishes one message for each key to partition 0: `keyed(c, "aab")` gives a, a, b at offsets 0, 1, 2."""
    c.publish_many(topic, [Outgoing(key, key=key, partition=0) for key in keys])


def start(c: Custody, count: int = 0, policy: Policy | None = None, *, keys: Iterable[str | None] = ()) -> None:
    """A topic of one partition with messages, and a group on it."""
    c.create_topic(TOPIC)
    if count:
        fill(c, count)
    if keys:
        keyed(c, keys)
    c.create_group(TOPIC, GROUP, policy)


def offsets(messages: Iterable[Message]) -> list[int]:
    return [message.offset for message in messages]


def drain(c: Custody, *, max_messages: int = 100, topic: str = TOPIC, group: str = GROUP) -> list[Message]:
    """Claims and acknowledges until there is nothing due."""
    seen: list[Message] = []
    while lease := c.claim(topic, group, max_messages=max_messages):
        seen += lease
        lease.ack()
    return seen


TABLES = (
    *("topics", "segments", "segment_bounds", "heads", "log", "kept_events", "producers", "producer_receipts"),
    "forgotten_producers",
    *("delayed", "transactions", "transaction_messages", "transaction_acks"),
    *("groups", "cursors", "frontiers", "leases", "returned", "cases", "parked", "freed", "awaited", "journal"),
    "replays",
)


def everything(db: psycopg.Connection[Any]) -> dict[str, list[Any]]:
    """All rows of all tables: what must not differ when a call has changed nothing."""
    return {
        name: db.execute(psycopg.sql.SQL("SELECT t::text FROM {} t ORDER BY 1").format(table)).fetchall()
        for name in TABLES
        for table in [psycopg.sql.Identifier("custody", name)]
    }
