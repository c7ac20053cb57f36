"""The database that is kept for our own tests is as new after each of them, or another one takes its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import LiteralString

import psycopg
import pytest
from tests.databases import Kept

from custody.store import staging

pytestmark = pytest.mark.core


@pytest.fixture
def kept(server_url: str, template: str) -> Iterator[Kept]:
    with closing(Kept(server_url, template)) as made:
        yield made


def used(kept: Kept) -> None:
    with kept.custody(worker="test") as c:
        assert c.topics() == []
        c.create_topic("orders", partitions=2)
        c.create_group("orders", "stock")
        assert c.publish("orders", 1).offset == 0
        c.claim("orders", "stock").nack(requeue=False)
    staging.call(kept.url, "open_stage", stage="staged_test")  # on a connection that the process keeps


def ids(kept: Kept) -> object:
    with psycopg.connect(kept.url) as connection:
        return connection.execute(
            "SELECT (SELECT array_agg(topic_id) FROM custody.topics), "
            "(SELECT array_agg(segment_id) FROM custody.segments), "
            "(SELECT array_agg(entry ORDER BY entry) FROM custody.journal)"
        ).fetchone()


def test_rows_segments_and_numbers_of_a_test_are_gone(kept: Kept) -> None:
    url, seen = kept.url, []
    for _ in range(3):
        used(kept)
        seen.append(ids(kept))
        kept.recycle()
        assert kept.url == url
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(
    "change",
    [
        "CREATE TABLE mine (n int)",
        "ALTER TABLE custody.topics ADD COLUMN mine int",
        "ALTER TABLE custody.groups DROP CONSTRAINT groups_topic_id_fkey",
        "CREATE INDEX mine ON custody.cases (updated_at)",
        "ALTER FUNCTION custody.publish RENAME TO mine",
        "ALTER TABLE custody.outbox DISABLE TRIGGER USER",
        "GRANT SELECT ON custody.topics TO PUBLIC",
        "GRANT CREATE ON SCHEMA public TO PUBLIC",
        "UPDATE custody.release SET digest = 'mine'",
        "SELECT custody.set_journal_retention('1 day')",
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET work_mem = ''1MB''', current_database()); END $$",
        "ANALYZE custody.topics",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    ],
)
def test_what_cannot_be_put_back_leads_to_another_database(kept: Kept, change: LiteralString) -> None:
    url = kept.url
    used(kept)
    with psycopg.connect(kept.url, autocommit=True) as connection:
        connection.execute(change)
    kept.recycle()
    assert kept.url != url
    used(kept)


@pytest.mark.parametrize("left", ["connection", "transaction", "lock"])
def test_who_stays_keeps_the_old_database(kept: Kept, left: str) -> None:
    url = kept.url
    used(kept)
    with ExitStack() as stack:
        if left == "lock":
            with kept.custody(worker="test") as c, c._db.connection() as connection:
                connection.execute("SELECT pg_advisory_lock(1)")
        else:
            other = stack.enter_context(closing(psycopg.connect(kept.url, autocommit=left == "connection")))
            other.execute("SELECT FROM custody.topics")
        kept.recycle()
    assert kept.url != url
    used(kept)
