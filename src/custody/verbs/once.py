"""Once: a consumer's record of what it has processed, in its own database and its own transaction.

For consumers whose results are in another database than Custody's, where an ack cannot join their transaction.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from psycopg import errors as pg_errors

from custody.errors import InvalidArgument
from custody.model.entities import Message
from custody.model.policy import Duration, seconds
from custody.store.driver_connection import driver_connection
from custody.store.postgres import Connection, translated

_TABLE = """
CREATE TABLE IF NOT EXISTS custody_once (
    consumer_group text NOT NULL, topic text NOT NULL, topic_uid uuid NOT NULL,
    partition int NOT NULL, "offset" bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, topic_uid, partition, "offset"))
"""


def once(connection: Any, group: str, message: Message) -> bool:
    """True if the message was not processed for this group before; that it is now, is recorded in the transaction.

    Somebody else who is processing it in an open transaction is waited for. The record is the table `custody_once` of
    the connection's database; it is made if it is not there. A topic that was deleted and made anew is another one,
    with messages of its own. A group is its name: one that was made anew, or rewound, has processed what it had.
    """
    if message.topic_uid is None:
        raise InvalidArgument(
            "the message does not say of which topic it is (topic_uid)", "Pass a message that Custody has delivered."
        )
    on = driver_connection(connection)
    with translated():
        _require_table(on)
        row = on.execute(
            'INSERT INTO custody_once (consumer_group, topic, topic_uid, partition, "offset")'
            " VALUES (%s, %s, %s, %s, %s) ON CONFLICT DO NOTHING",
            [group, message.topic, message.topic_uid, message.partition, message.offset],
        )
        return row.rowcount == 1


def forget_once(connection: Any, *, older_than: Duration, group: str | None = None) -> int:
    """Removes old records, of one group or of all, and says how many. A message that is redelivered later counts as
    new."""
    on = driver_connection(connection)
    with translated():
        _require_table(on)
        return on.execute(
            "DELETE FROM custody_once WHERE at <= now() - %s AND consumer_group = coalesce(%s, consumer_group)",
            [timedelta(seconds=seconds(older_than)), group],
        ).rowcount


def _require_table(on: Connection) -> None:
    found = on.execute("SELECT to_regclass('custody_once') IS NOT NULL").fetchone()
    if found is not None and all(_values(found)):
        return
    # two that make it at once would fail: IF NOT EXISTS does not see one that is not committed
    on.execute("SELECT pg_advisory_xact_lock(hashtext('custody_once'))")
    try:
        on.execute(_TABLE)
    except pg_errors.InsufficientPrivilege as error:
        raise InvalidArgument(
            "the table custody_once is not there and cannot be made by this user",
            f"Have it made once: {' '.join(_TABLE.split())}",
        ) from error


def _values(row: Any) -> Any:
    """A row as its caller's connection makes them: a tuple, or a mapping."""
    return row.values() if hasattr(row, "values") else row
