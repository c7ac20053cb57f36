"""Messages flow through a topic whose retention drops segments: disk use stays bounded, and nothing is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest

import custody
from custody import Constant, Outgoing, Policy, Retention
from custody.errors import Transient

TOPIC, GROUP = "flow", "sink"
BATCH = 1000
PAYLOAD = "x" * 150
MB = 2**20


@pytest.fixture
def live(database_url: str) -> Iterator[custody.Custody]:
    """Custody with the real clock."""
    with custody.connect(database_url) as opened:
        yield opened


@dataclass
class Flow:
    """What is measured at each tenth of the way."""

    count: int
    by_consumer: bool
    """The consumer maintains after each batch, else a thread does: a small run must not hang on timing."""
    took: list[float] = field(default_factory=list)
    log: list[int] = field(default_factory=list)
    journal: list[int] = field(default_factory=list)
    upkeep: Counter[str] = field(default_factory=Counter)
    dead: int = 0

    @property
    def rates(self) -> list[float]:
        return [self.count / 10 / took for took in self.took]

    def report(self) -> str:
        lines = [f"{self.count:,} messages, {self.count / sum(self.took):,.0f} a second; upkeep: {dict(self.upkeep)}"]
        for n, rate in enumerate(self.rates):
            sizes = f"log {self.log[n] / MB:6.1f} MB, journal {self.journal[n] / MB:5.1f} MB"
            lines.append(f"tenth {n + 1:2}: {rate:9,.0f} msg/s, {sizes}")
        return "\n".join(lines)


def publish(url: str, count: int, of: threading.Semaphore, stop: threading.Event) -> None:
    """One producer, in batches; never further ahead of the consumer than a few of them."""
    with custody.connect(url) as c:
        for first in range(0, count, BATCH):
            while not of.acquire(timeout=1):
                if stop.is_set():
                    return
            c.publish_many(TOPIC, [Outgoing(PAYLOAD, key=f"k{n % 1000}") for n in range(first, first + BATCH)])


def maintain(url: str, flow: Flow, stop: threading.Event) -> None:
    with custody.connect(url) as c:
        while not stop.wait(0.2):
            flow.upkeep.update(step.did for step in c.maintain())


def sizes(db: psycopg.Connection[Any], pattern: str) -> int:
    query = """SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
               WHERE relnamespace = 'custody'::regnamespace AND relkind = 'r' AND relname ~ %s"""
    row = db.execute(query, [pattern]).fetchone()
    assert row is not None
    return int(row[0])


def consume(c: custody.Custody, db: psycopg.Connection[Any], flow: Flow, of: threading.Semaphore) -> None:
    """Claims and acknowledges until everything is resolved; a few messages are refused."""
    done = 0
    began = time.perf_counter()
    while done < flow.count:
        try:
            lease = c.claim(TOPIC, GROUP, max_messages=BATCH)
        except Transient:
            continue
        if not lease:
            time.sleep(0.002)
            continue
        bad = [message for message in lease if (message.partition * 7919 + message.offset) % 9973 == 0]
        if bad:
            lease.nack(bad, error="refused", requeue=False)
        if len(bad) < len(lease):
            lease.ack()
        flow.dead += len(bad)
        if flow.by_consumer:
            flow.upkeep.update(step.did for step in c.maintain())
        before, done = done, done + len(lease)
        for _ in range(done // BATCH - before // BATCH):
            of.release()
        while len(flow.took) < 10 and done >= flow.count * (len(flow.took) + 1) // 10:
            now = time.perf_counter()
            flow.took.append(now - began)
            began = now
            flow.log.append(sizes(db, r"^log_\d+$"))
            flow.journal.append(sizes(db, r"^journal_\d+$"))


def run(
    c: custody.Custody, db: psycopg.Connection[Any], url: str, flow: Flow, *, ahead: int, keep: int, journal: int
) -> None:
    retention = Retention(size=keep, segment_size=keep // 8)
    c.create_topic(TOPIC, partitions=4, retention=retention)
    c.set_journal_retention(size=journal)
    c.create_group(TOPIC, GROUP, Policy(ordering="none", max_attempts=1, backoff=Constant("1s")))
    room, stop = threading.Semaphore(ahead), threading.Event()
    threads = [threading.Thread(target=publish, args=[url, flow.count // 2, room, stop]) for _ in range(2)]
    if not flow.by_consumer:
        threads.append(threading.Thread(target=maintain, args=[url, flow, stop]))
    for thread in threads:
        thread.start()
    try:
        consume(c, db, flow, room)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    for _ in range(3):  # what is left to do now that nothing moves
        flow.upkeep.update(step.did for step in c.maintain())


def check(c: custody.Custody, db: psycopg.Connection[Any], flow: Flow, keep: int, journal: int) -> None:
    """Everything was resolved exactly once; what is on disk is what retention says, and a few segments of slack."""
    topic, stats = c.topic(TOPIC), c.stats(TOPIC, GROUP)
    assert sum(topic.tails) == flow.count
    assert (stats.depth, stats.dead) == (0, flow.dead)
    assert flow.upkeep["dropped"] > 0
    assert topic.message_count < flow.count, "nothing was dropped"
    # each letter still has its event, whether its segment is there or not
    assert db.execute("SELECT count(*) FROM custody.dead_letters").fetchone() == (flow.dead,)
    assert max(flow.log) < 2 * keep, flow.report()
    assert max(flow.journal) < 2 * journal + 2 * MB, flow.report()


def dead_tuples(db: psycopg.Connection[Any]) -> str:
    db.execute("SELECT pg_stat_force_next_flush()")
    rows = db.execute(
        """SELECT relname, n_live_tup, n_dead_tup, pg_total_relation_size(relid) FROM pg_stat_user_tables
           WHERE schemaname = 'custody' AND relname !~ '^log_' ORDER BY n_dead_tup DESC LIMIT 8"""
    ).fetchall()
    return "\n".join(
        f"{name:16} {live:>8,} live {dead:>8,} dead {size // 1024:>8,} kB" for name, live, dead, size in rows
    )


@pytest.mark.req("V7", "V13")
def test_messages_flow_while_retention_drops_segments(
    live: custody.Custody, db: psycopg.Connection[Any], database_url: str
) -> None:
    flow = Flow(60_000, by_consumer=True)
    run(live, db, database_url, flow, ahead=6, keep=4 * MB, journal=2 * MB)
    print(flow.report(), dead_tuples(db), sep="\n")
    check(live, db, flow, 4 * MB, 2 * MB)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.req("V7", "V13")
def test_five_million_messages_flow_while_retention_drops_segments(
    live: custody.Custody, db: psycopg.Connection[Any], database_url: str
) -> None:
    flow = Flow(5_000_000, by_consumer=False)
    run(live, db, database_url, flow, ahead=40, keep=128 * MB, journal=8 * MB)
    print(flow.report(), dead_tuples(db), sep="\n")
    check(live, db, flow, 128 * MB, 8 * MB)
    assert flow.rates[-1] >= 0.9 * flow.rates[0], flow.report()
