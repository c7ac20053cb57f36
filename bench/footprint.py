"""What a successful message leaves behind besides its event: rows written, dead row versions, bytes of WAL."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import sleep

import custody
from bench.backlog import fill
from bench.report import Row, at_most
from bench.stage import Connection, Stage, plain

SIZES = (1, 10, 100, 1000)
WARM = 10
MAX_ROWS = 0.01
MAX_BYTES = 10


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
