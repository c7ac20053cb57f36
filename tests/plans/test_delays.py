"""Delayed messages cost a claim one look at their index, however many wait and however many have gone."""

from __future__ import annotations

import psycopg
import pytest

import custody
from custody import Custody, Outgoing

pytestmark = [pytest.mark.core, pytest.mark.req("G15")]

NOW = "SELECT * FROM custody.claim('jobs', 'g', 1000)"
SOON = "SELECT * FROM custody.claim('jobs', 'g', 1000, p_now => clock_timestamp() + interval '1 hour')"


@pytest.fixture
def jobs(database_url: str, db: psycopg.Connection) -> None:
    """900 messages that are due within the hour, and 3,000 that are not."""
    with custody.connect(database_url) as c:
        make(c)
    db.execute("ANALYZE custody.delayed")


def make(c: Custody) -> None:
    c.create_topic("jobs")
    c.create_group("jobs", "g")
    c.publish_delayed("jobs", [Outgoing(n, delay=n + 60) for n in range(900)])
    c.publish_delayed("jobs", [Outgoing(n, delay=n + 100_000) for n in range(3000)])


def entries_read(db: psycopg.Connection, claim: str) -> int:
    """Entries of the index that a claim looked at, those of messages that are gone too."""
    count = "SELECT pg_stat_get_xact_tuples_returned('custody.delayed_due'::regclass)"
    with db.transaction():
        before = db.execute(count).fetchone()
        db.execute(claim)
        after = db.execute(count).fetchone()
    assert before is not None
    assert after is not None
    return int(after[0] - before[0])


def test_a_claim_looks_at_one_of_those_that_wait(jobs: None, db: psycopg.Connection) -> None:
    assert entries_read(db, NOW) == 1


def test_what_was_delivered_is_not_walked_through(jobs: None, db: psycopg.Connection, database_url: str) -> None:
    """Another transaction is open all the time: nothing that has gone can be removed from the index."""
    with psycopg.connect(database_url) as holder:
        holder.execute("SELECT pg_current_xact_id()")
        holder.execute("SELECT count(*) FROM custody.delayed")
        assert len(db.execute(SOON).fetchall()) == 901
        assert entries_read(db, SOON) <= 2
