"""What a successful message leaves behind besides its event: rows written, dead row versions, bytes of WAL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import sleep

from psycopg import sql

import custody
from bench.backlog import fill, log_table, outgoing
from bench.report import Row, at_most
from bench.sizes import PAYLOAD_BYTES
from bench.stage import Connection, Stage, plain

SIZES = (1, 10, 100, 1000)
WARM = 10
MAX_ROWS = 0.01
MAX_BYTES = 10
MAX_ROWS_OF_ONE, MAX_BYTES_OF_ONE = 4, 900
MAX_WAL, MAX_DISK = 190, 200
COLUMNS = sql.SQL('segment_id, partition, "offset", published_at, key, kind, payload, headers')


@dataclass(frozen=True)
class Written:
    """For each message."""

    rows: float
    dead: float
    wal: float


def rows(stage: Stage) -> Iterator[Row]:
    with stage.database() as url, plain(url) as connection:
        for size in SIZES:
            yield from batch(stage, url, connection, size)
        yield from one(stage, url, connection)
        yield from stored(stage, url, connection)


def batch(stage: Stage, url: str, connection: Connection, size: int) -> Iterator[Row]:
    rounds, repetitions = stage.sizes.footprint_rounds, stage.sizes.repetitions
    topic = f"batch-{size}"
    with custody.connect(url) as c:
        fill(c, connection, topic, size * (rounds + WARM) * repetitions)
        c.create_group(topic, "workers", custody.Policy(ordering="key"))
    found = [consume(url, connection, topic, size, rounds) for _ in range(repetitions)]
    judged = size == SIZES[-1]
    yield Row(
        what=f"rows written beyond the event, batch {size:,}",
        measured=median(one.rows for one in found),
        unit="a msg",
        target=at_most(MAX_ROWS) if judged else None,
        note=f"{median(one.dead for one in found):.3g} dead row versions",
    )
    yield Row(
        what=f"WAL beyond the event, batch {size:,}",
        measured=median(one.wal for one in found),
        unit="B/msg",
        target=at_most(MAX_BYTES) if judged else None,
    )


def one(stage: Stage, url: str, connection: Connection) -> Iterator[Row]:
    """Publish one message, claim it and ack it with the next claim, less a bare INSERT of the same event."""
    rounds, repetitions = stage.sizes.footprint_rounds, stage.sizes.repetitions
    with custody.connect(url) as c:
        c.create_topic("one")
        c.create_group("one", "workers", custody.Policy(ordering="key"))
        table = log_table(connection, "one")
    connection.execute(sql.SQL("CREATE TABLE bare (LIKE {} INCLUDING ALL)").format(table))
    found = [flow(url, connection, table, rounds) for _ in range(repetitions)]
    what = "beyond the event, publish + claim + ack of 1"
    yield Row(
        what=f"rows written {what}",
        measured=median(one.rows for one in found),
        unit="a msg",
        target=at_most(MAX_ROWS_OF_ONE),
        note=f"{median(one.dead for one in found):.3g} dead row versions",
    )
    yield Row(
        what=f"WAL {what}",
        measured=median(one.wal for one in found),
        unit="B/msg",
        target=at_most(MAX_BYTES_OF_ONE),
    )


def stored(stage: Stage, url: str, connection: Connection) -> Iterator[Row]:
    """The event itself, published by the thousand: what it takes in the WAL and, with indexes, on disk."""
    rounds, messages = stage.sizes.footprint_rounds, outgoing(1000, size=150)
    with custody.connect(url) as c:
        c.create_topic("stored")
        table = log_table(connection, "stored")
        for _ in range(WARM):
            c.publish_many("stored", messages)
        start = wal(connection)
        for _ in range(rounds):
            c.publish_many("stored", messages)
        written = wal(connection) - start
    connection.execute(sql.SQL("VACUUM {}").format(table))
    size = connection.execute("SELECT pg_total_relation_size(%s)", [table.as_string(connection)]).fetchall()[0][0]
    yield Row(
        what="WAL of an event of 150 bytes, batch 1,000",
        measured=written / (rounds * len(messages)),
        unit="B/msg",
        target=at_most(MAX_WAL),
    )
    yield Row(
        what="disk of an event of 150 bytes, batch 1,000",
        measured=size / ((rounds + WARM) * len(messages)),
        unit="B/msg",
        target=at_most(MAX_DISK),
    )


def flow(url: str, connection: Connection, table: sql.Identifier, rounds: int) -> Written:
    def round_(c: custody.Custody, lease: custody.Lease | None) -> custody.Lease:
        c.publish("one", b"x" * PAYLOAD_BYTES, key="key")
        return c.claim("one", "workers") if lease is None else lease.next()

    with custody.connect(url, pool_size=1) as c:
        lease = None
        for _ in range(WARM):
            lease = round_(c, lease)
        assert lease is not None
        lease.ack()
    before = counters(connection)
    with custody.connect(url, pool_size=1) as c:
        start, lease = wal(connection), None
        for _ in range(rounds):
            lease = round_(c, lease)
        assert lease is not None
        lease.ack()
        written = wal(connection) - start
    after = counters(connection)
    copies = sql.SQL('SELECT {} FROM {} ORDER BY "offset" DESC LIMIT %s').format(COLUMNS, table)
    events = connection.execute(copies, [rounds]).fetchall()
    start = wal(connection)
    insert = sql.SQL("INSERT INTO bare ({}) VALUES (%s, %s, %s, %s, %s, %s, %s, %s)").format(COLUMNS)
    for event in reversed(events):
        connection.execute(insert, list(event))
    bare = wal(connection) - start
    return Written((after[0] - before[0]) / rounds, (after[1] - before[1]) / rounds, (written - bare) / rounds)


def consume(url: str, connection: Connection, topic: str, size: int, rounds: int) -> Written:
    """Claim and ack, by a client of its own: what a session has counted is published when it ends."""
    with custody.connect(url, pool_size=1) as c:
        for _ in range(WARM):
            c.claim(topic, "workers", max_messages=size).ack()
    before = counters(connection)
    with custody.connect(url, pool_size=1) as c:
        start = wal(connection)
        for _ in range(rounds):
            c.claim(topic, "workers", max_messages=size).ack()
        written = wal(connection) - start
    after = counters(connection)
    messages = size * rounds
    return Written((after[0] - before[0]) / messages, (after[1] - before[1]) / messages, written / messages)


def wal(connection: Connection) -> int:
    (position,) = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchall()[0]
    return int(str(position))


def counters(connection: Connection) -> tuple[int, int]:
    """Rows written, and row versions that died by it, in all tables of Custody but the log itself."""
    for _ in range(500):
        others = connection.execute(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'custody'"
        ).fetchall()
        if not others:
            break
        sleep(0.01)
    written, dead = connection.execute(
        """SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0)::bigint,
                  coalesce(sum(n_tup_upd + n_tup_del), 0)::bigint
           FROM pg_stat_user_tables WHERE schemaname = 'custody' AND relname NOT LIKE 'log\\_%'"""
    ).fetchall()[0]
    return int(str(written)), int(str(dead))
