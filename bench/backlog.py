"""Messages to measure with: made in Python to be published, or made by the server to be consumed."""

from __future__ import annotations

import random

from psycopg import sql

from bench.sizes import KEYS, PAYLOAD_BYTES
from bench.stage import Connection
from custody import Custody, Outgoing


def outgoing(count: int, *, keys: int = KEYS, size: int = PAYLOAD_BYTES) -> list[Outgoing]:
    """Messages with payloads of their own, the keys at random from so many."""
    chosen = random.Random(1)
    return [Outgoing(b"%0*d" % (size, number), key=f"key-{chosen.randrange(keys)}") for number in range(count)]


def publish(c: Custody, connection: Connection, topic: str, count: int) -> sql.Identifier:
    """A topic of one partition with so many messages that were published by the thousand, so that it has batches."""
    c.create_topic(topic)
    table = log_table(connection, topic)
    messages = outgoing(1000)
    for _ in range(0, count, len(messages)):
        c.publish_many(topic, messages)
    connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(table))
    connection.execute("CHECKPOINT")
    return table


def log_table(connection: Connection, topic: str) -> sql.Identifier:
    """The table that holds the only segment of a topic."""
    found = connection.execute(
        "SELECT segment_id FROM custody.segments JOIN custody.topics USING (topic_id) WHERE name = %s", [topic]
    ).fetchall()
    return sql.Identifier("custody", f"log_{found[0][0]}")


def fill(c: Custody, connection: Connection, topic: str, count: int, *, keys: int | None = KEYS) -> sql.Identifier:
    """A topic of one partition with so many messages; without `keys` each has a key of its own.

    Written by the server itself, then vacuumed: every later reading finds the same table.
    """
    c.create_topic(topic)
    table = log_table(connection, topic)
    connection.execute("SELECT setseed(0.5)")
    connection.execute(
        sql.SQL(
            """INSERT INTO {} (segment_id, partition, "offset", published_at, key, kind, payload)
               SELECT s.segment_id, 0, n, clock_timestamp(),
                      'key-' || CASE WHEN %(keys)s::int IS NULL THEN n ELSE floor(random() * %(keys)s::int)::bigint END,
                      'b', convert_to(lpad(n::text, %(bytes)s, '0'), 'UTF8')
               FROM custody.segments s JOIN custody.topics t USING (topic_id),
                    generate_series(0, %(count)s::bigint - 1) n
               WHERE t.name = %(topic)s"""
        ).format(table),
        {"keys": keys, "bytes": PAYLOAD_BYTES, "count": count, "topic": topic},
    )
    connection.execute(sql.SQL("VACUUM (ANALYZE) {}").format(table))
    connection.execute("CHECKPOINT")
    return table
