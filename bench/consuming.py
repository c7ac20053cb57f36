"""Claim, read and acknowledge, beside a bare SELECT of the same rows, with and without a committed INSERT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

from psycopg import sql

from bench.backlog import fill, publish
from bench.measure import in_turn, rate, ratio
from bench.report import Row, at_least
from bench.stage import Connection, Stage
from custody import Custody, Message, Policy

TARGETS = {1000: 300_000, 100: 65_000}
RATIOS = {1000: 0.7, 100: 0.5}


def rows(stage: Stage) -> Iterator[Row]:
    for size in (1000, 100):
        yield from batch(stage, size)


def batch(stage: Stage, size: int) -> Iterator[Row]:
    messages = size * stage.sizes.batches[size]
    with stage.open() as (c, connection):
        table = fill(c, connection, "singles", messages)
        publish(c, connection, "orders", messages)
        work = {
            "drain": drainer(c, "orders", size),
            "singles": drainer(c, "singles", size),
            "apart": drainer(c, "orders", size, together=False),
            "select": selector(connection, table, messages, size),
            "commit": selector(connection, table, messages, size, committing=True),
            "messages": selector(connection, table, messages, size, as_messages=True),
        }
        for warm in work.values():
            warm()
        found = in_turn(stage.sizes.repetitions, {name: partial(rate, messages, one) for name, one in work.items()})
    yield Row(
        what=f"claim + read + ack, batch {size:,}",
        measured=found["drain"].median,
        unit="msg/s",
        target=at_least(TARGETS[size]),
        beside="SELECT and an INSERT",
        other=found["commit"].median,
        ratio=ratio(found["drain"], found["commit"]),
        ratio_target=at_least(RATIOS[size]),
    )
    yield Row(
        what=f"  batch {size:,}, of messages that were published one by one",
        measured=found["singles"].median,
        unit="msg/s",
        beside="SELECT and an INSERT",
        other=found["commit"].median,
        ratio=ratio(found["singles"], found["commit"]),
        ratio_target=at_least(RATIOS[size]),
    )
    yield Row(
        what=f"  batch {size:,}, against reading alone",
        measured=found["drain"].median,
        unit="msg/s",
        beside="bare SELECT",
        other=found["select"].median,
        ratio=ratio(found["drain"], found["select"]),
    )
    yield Row(
        what=f"  batch {size:,}, against the same messages in Python",
        measured=found["drain"].median,
        unit="msg/s",
        beside="bare SELECT into messages",
        other=found["messages"].median,
        ratio=ratio(found["drain"], found["messages"]),
    )
    yield Row(
        what=f"  batch {size:,}, against ack and claim in two transactions",
        measured=found["drain"].median,
        unit="msg/s",
        beside="two transactions",
        other=found["apart"].median,
        ratio=ratio(found["drain"], found["apart"]),
    )


_numbers = count()


def drainer(
    c: Custody, topic: str, size: int, policy: Policy | None = None, *, together: bool = True
) -> Callable[[], None]:
    """Consumes the whole topic as a new group, once a call. Together: an ack and the next claim are one transaction."""

    def drain() -> None:
        group = f"group-{next(_numbers)}"
        c.create_group(topic, group, policy)
        lease = c.claim(topic, group, max_messages=size)
        while lease:
            if together:
                lease = lease.next()
            else:
                lease.ack()
                lease = c.claim(topic, group, max_messages=size)

    return drain


def selector(
    connection: Connection,
    table: sql.Identifier,
    messages: int,
    size: int,
    *,
    as_messages: bool = False,
    committing: bool = False,
) -> Callable[[], None]:
    """Reads the whole table in the same batches, once a call: rows as tuples, or made into messages.

    Committing: after each batch a row says how far it has come, which is the least that a consumer has to write.
    """
    connection.execute("CREATE TABLE IF NOT EXISTS bare_progress (until bigint)")
    query = sql.SQL(
        """SELECT "offset", published_at, key, kind, payload, headers FROM {}
           WHERE partition = 0 AND "offset" >= %s AND "offset" < %s ORDER BY "offset" """
    ).format(table)

    def select() -> None:
        for start in range(0, messages, size):
            rows = connection.cursor(binary=True).execute(query, [start, start + size]).fetchall()
            if as_messages:
                [message(*row) for row in rows]
            if committing:
                connection.execute("INSERT INTO bare_progress VALUES (%s)", [start + size])

    return select


def message(offset: Any, published_at: Any, key: Any, _: object, payload: Any, headers: Any) -> Message:
    return Message(
        topic="orders",
        partition=0,
        offset=offset,
        key=key,
        payload=payload,
        headers=headers or {},
        attempt=1,
        published_at=published_at,
    )
