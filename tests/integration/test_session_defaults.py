"""Defaults that somebody has set on the database or the role: Custody says itself what it needs, and bears the rest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict
from tests.waiting import wait_for

import custody
from custody import Constant, Outgoing, Policy, outbox
from custody.errors import DatabaseUnavailable, IsolationLevel
from custody.relay import Relay
from custody.spark.database import arrow
from custody.store import migrate as schema

pytestmark = pytest.mark.core

Default = Callable[[str, str], None]


@pytest.fixture
def default(database_url: str, db: psycopg.Connection) -> Default:
    """Sets a default of the test's database."""
    name = sql.Identifier(str(conninfo_to_dict(database_url)["dbname"]))

    def set_default(setting: str, value: str) -> None:
        statement = sql.SQL("ALTER DATABASE {} SET {} = {}")
        db.execute(statement.format(name, sql.Identifier(setting), sql.SQL(value)))

    return set_default


def life(url: str) -> None:
    """A bit of everything."""
    with custody.connect(url, worker="test") as c:
        c.create_topic("t", partitions=2)
        c.create_group("t", "g", Policy(ordering="key", max_attempts=1, backoff=Constant("0s"), dead_letter="topic"))
        before = datetime.now(UTC) - timedelta(seconds=5)
        c.publish("t", {"n": 0}, partition=0, headers={"h": "é"})
        c.publish_many("t", [Outgoing(b"\x00\xff", partition=0, key="k"), Outgoing("text", partition=0)])
        delayed = c.publish("t", "later", delay="1h", partition=1)
        assert (delayed.deliver_at - before) > timedelta(minutes=59)
        assert delayed.deliver_at.utcoffset() == timedelta(0)
        lease = c.claim("t", "g", max_messages=10, partition=0)
        assert [message.payload for message in lease] == [{"n": 0}, b"\x00\xff", "text"]
        assert all(message.published_at >= before for message in lease)
        assert abs(lease.deadline - datetime.now(UTC) - timedelta(seconds=30)) < timedelta(seconds=20)
        lease.nack(lease.messages[1], error="no")
        lease.ack()
        (letter,) = c.dead("t", "g")
        assert (letter.payload, letter.last_error) == (b"\x00\xff", "no")
        assert letter.died_at >= before
        copy = c.read("t-dlq")[0]
        assert copy.payload == b"\x00\xff"
        for name, value in copy.headers.items():
            if name.endswith(("-at", "-delivery")) and value[:2] == "20":
                assert datetime.fromisoformat(value) >= before, name
        assert c.trace("t", 0, 1)[0].kind == "claim"
        assert c.stats("t", "g").dead == 1
        assert len(c.delayed("t")) == 1
        assert c.server().schema_version > 0
        c.handling_times()
        c.overview()
        assert c.init_producer("p").publish("t", 1).offset >= 0
        c.maintain()
        with psycopg.connect(url) as mine:
            mine.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            outbox.write(mine, event_type="e", payload={"n": 1}, destination="test:")
        seen: list[object] = []
        Relay(url, {"test": lambda event: seen.append(event.payload)}, poll="10ms").drain("20s")
        assert seen == [{"n": 1}]
    with arrow.Planner(url) as planner:
        reads = [one for some in planner.reads("t", 0, 0, 3) for one in some]
        rows = [row for batch in arrow.events(url, reads) for row in batch.to_pylist()]
        assert [row["payload"] for row in rows] == [b'{"n":0}', b"\x00\xff", b"text"]
        assert all(row["published_at"] >= before for row in rows)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("default_transaction_isolation", "'serializable'"),
        ("default_transaction_isolation", "'repeatable read'"),
        ("search_path", "''"),
        ("TimeZone", "'Asia/Kathmandu'"),
        ("DateStyle", "'German, DMY'"),
        ("IntervalStyle", "'sql_standard'"),
        ("bytea_output", "'escape'"),
        ("extra_float_digits", "'-10'"),
        ("lock_timeout", "'10s'"),
        ("statement_timeout", "'20s'"),
    ],
)
def test_a_default_of_the_database_changes_nothing(
    database_url: str, default: Default, setting: str, value: str
) -> None:
    default(setting, value)
    life(database_url)


def test_the_schema_is_made_whatever_the_defaults(database_url: str, default: Default, db: psycopg.Connection) -> None:
    for setting, value in (
        ("default_transaction_isolation", "'serializable'"),
        ("search_path", "''"),
        ("DateStyle", "'German, DMY'"),
        ("statement_timeout", "'200ms'"),
    ):
        default(setting, value)
    db.execute("DROP SCHEMA custody CASCADE")
    waiting = """
        SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
        AND clock_timestamp() - query_start > '300ms'
    """
    with psycopg.connect(database_url) as earlier, ThreadPoolExecutor() as threads:
        earlier.execute("SET statement_timeout = 0")
        schema.lock(earlier)
        later = threads.submit(custody.migrate, database_url)
        wait_for(lambda: later.done() or db.execute(waiting).fetchone() is not None, "the migration does not wait")
        earlier.rollback()
        assert later.result()
    default("statement_timeout", "'20s'")
    with custody.connect(database_url) as c:
        c.create_topic("t")
        assert c.publish("t", 1).offset == 0


def test_a_callers_own_transaction_keeps_its_level_and_is_refused(database_url: str, default: Default) -> None:
    default("default_transaction_isolation", "'serializable'")
    with custody.connect(database_url) as c:
        c.create_topic("t")
        c.create_group("t", "g")
        c.publish("t", 1)
        lease = c.claim("t", "g")
        with psycopg.connect(database_url) as mine:
            with pytest.raises(IsolationLevel, match="READ COMMITTED"):
                lease.ack(connection=mine)
            mine.rollback()
            mine.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
            assert lease.ack(connection=mine).settled == 1


def test_a_database_that_somebody_has_made_read_only_says_so(database_url: str, default: Default) -> None:
    """It may be full, or about to be moved: that is not overridden."""
    default("default_transaction_read_only", "on")
    with (
        custody.connect(database_url) as c,
        pytest.raises(DatabaseUnavailable, match="default_transaction_read_only"),
    ):
        c.create_topic("t")


def test_its_own_level_costs_no_further_round_trip(database_url: str, default: Default) -> None:
    """It is in the BEGIN of a transaction, and set once for what runs without one."""
    default("default_transaction_isolation", "'serializable'")
    with custody.connect(database_url, pool_size=1) as c:
        with c._db.connection() as connection:
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
            assert connection.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
            assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        with c._db.transaction() as connection:
            assert connection.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
