"""Once: a consumer's record of processed messages, in its own database and its own transaction.

It is for consumers whose results are in another database than Custody's, where an ack cannot be part of the
transaction.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from psycopg import Cursor
from psycopg import errors as pg_errors
from psycopg.rows import tuple_row

from custody.errors import InvalidArgument
from custody.model.entities import Message
from custody.model.policy import Duration, seconds
from custody.store.driver_connection import joined
from custody.store.postgres import own_cursor, translated

_TABLE = """
CREATE TABLE IF NOT EXISTS custody_once (
    consumer_group text NOT NULL, topic text NOT NULL, topic_uid uuid NOT NULL,
    partition int NOT NULL, "offset" bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, topic_uid, partition, "offset"))
"""


def once(connection: Any, group: str, message: Message) -> bool:
    """Records in the transaction that this group processes the message. False if it had processed it before.

    Waits for another open transaction that is processing the same message. The record is the table `custody_once` in
    the connection's database, which is created if it is missing. A topic that was deleted and created again has new
    messages. A group is identified by its name: if it was created again, or rewound, its records still count.
    """
    if message.topic_uid is None:
        raise InvalidArgument("the message has no topic_uid", "Pass a message that Custody has delivered.")
    with joined(connection) as on, translated():
        cursor = own_cursor(on, tuple_row)
        _require_table(cursor)
        cursor.execute(
            'INSERT INTO custody_once (consumer_group, topic, topic_uid, partition, "offset")'
            " VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
            [group, message.topic, message.topic_uid, message.partition, message.offset],
        )
        return cursor.rowcount == 1


def forget_once(connection: Any, *, older_than: Duration, group: str | None = None) -> int:
    """Removes old records of one group or of all. Returns how many. A message that is redelivered later counts as
    new."""
    with joined(connection) as on, translated():
        cursor = own_cursor(on, tuple_row)
        _require_table(cursor)
        cursor.execute(
            "DELETE FROM custody_once WHERE at <= now() - %s AND consumer_group = coalesce(%s, consumer_group)",
            [timedelta(seconds=seconds(older_than)), group],
        )
        return cursor.rowcount


def _require_table(cursor: Cursor[tuple[Any, ...]]) -> None:
    cursor.execute("SELECT to_regclass('custody_once') IS NOT NULL")
    if cursor.fetchone() == (True,):
        return
    # without the lock two concurrent calls could fail: IF NOT EXISTS does not see a table that is not committed
    cursor.execute("SELECT pg_advisory_xact_lock(hashtext('custody_once'))")
    try:
        cursor.execute(_TABLE)
    except pg_errors.InsufficientPrivilege as error:
        raise InvalidArgument(
            "the table custody_once is missing, and this user may not create it",
            f"Have it created once: {' '.join(_TABLE.split())}",
        ) from error
