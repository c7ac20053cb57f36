"""What a relay's verbs read does not grow with the backlog, nor with what is published already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from tests.conftest import url_of
from tests.plans.test_plans import assert_bounded, done_by

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("O4")]

PENDING = 20_000
CLAIM = "SELECT * FROM custody.outbox_claim('r', 100, '30 s', 10, NULL, '{test}', p_now => '2030-01-02')"


@pytest.fixture(scope="module", params=[PENDING, pytest.param(200_000, marks=pytest.mark.long)])
def full_url(server_url: str, template: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A backlog, half as many published events, and a topic that never had an event of the outbox."""
    name = f"custody_outbox_plans_{os.getpid()}_{request.param}"
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
        url = url_of(server_url, name)
        with psycopg.connect(url, autocommit=True) as connection:
            # as writing and relaying would have left them, only faster
            connection.execute("ALTER TABLE custody.outbox DISABLE TRIGGER USER")
            for status, count in (("PUBLISHED", request.param // 2), ("PENDING", request.param)):
                connection.execute(
                    "INSERT INTO custody.outbox (event_id, event_type, destination, kind, payload, ordering_key, "
                    "created_at, available_at, updated_at, status, published_at) "
                    "SELECT gen_random_uuid(), 'e', 'test:', 'j', '{}', "
                    "CASE WHEN n %% 2 = 0 THEN 'k' || n %% 1000 END, "
                    "'2030-01-01', '2030-01-01', '2030-01-01', %(status)s, "
                    "CASE WHEN %(status)s = 'PUBLISHED' THEN '2030-01-01'::timestamptz END "
                    "FROM generate_series(1, %(count)s) n",
                    {"status": status, "count": count},
                )
            connection.execute("ALTER TABLE custody.outbox ENABLE TRIGGER USER")
            connection.execute("VACUUM ANALYZE custody.outbox")
        with custody.connect(url) as c:
            c.create_topic("other", partitions=2)
            c.create_group("other", "g")
            c.publish_many("other", range(200))
        yield url
        server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def full(full_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(full_url) as connection:
        yield connection
        connection.rollback()


def test_a_claim_reads_a_few_rows_for_each_event(full: psycopg.Connection[Any]) -> None:
    for claims in range(7):  # generic plans too
        rows, done = done_by(full, CLAIM)
        assert len(rows) == 101
        # what is claimed lies among what is open; whole keys would be 1,451, and ten times that with a larger backlog
        assert_bounded(done, 800 + 100 * claims)


def test_so_does_a_settle(full: psycopg.Connection[Any]) -> None:
    for _ in range(7):
        _, *rows = full.execute(CLAIM).fetchall()
        assert len(rows) == 100
        settle = (
            "SELECT * FROM custody.outbox_settle(%s, %s, array_fill('published'::text, '{100}'), "
            "array_fill(NULL::text, '{100}'), array_fill(NULL::float8, '{100}'), 10, p_now => '2030-01-02')"
        )
        settled, done = done_by(full, settle, rows[0][12], [row[0] for row in rows])
        assert len(settled) == 100
        assert_bounded(done, 500)


def test_a_backlog_that_has_to_wait_costs_a_window_and_no_more(full: psycopg.Connection[Any]) -> None:
    """All keys wait for their first event; the window bounds a claim, and says where to go on."""
    full.execute(
        "UPDATE custody.outbox SET available_at = '2031-01-01' WHERE status = 'PENDING' AND ordering_key IS NULL "
        "OR id IN (SELECT min(id) FROM custody.outbox WHERE status = 'PENDING' AND ordering_key IS NOT NULL "
        "GROUP BY ordering_key)"
    )
    (first, *rows), done = done_by(full, CLAIM)
    assert rows == []
    assert first[14] is not None, "it does not say where to go on"
    assert_bounded(done, 5000 * 4)


def test_a_topic_without_events_in_the_outbox_reads_none(full: psycopg.Connection[Any]) -> None:
    rows, done = done_by(full, "SELECT * FROM custody.claim('other', 'g', 100)")
    assert len(rows) > 1
    assert done.get("outbox", (0, 0)) == (0, 0)
    _, done = done_by(full, "SELECT * FROM custody.send('other', '1')")
    assert done.get("outbox", (0, 0)) == (0, 0)


def test_a_claim_puts_nothing_into_an_index(database_url: str) -> None:
    """It fits on the event's own page, and no index has anything of what it changes: a HOT update."""
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "SELECT custody.outbox_write('t', to_jsonb(repeat('x', 200)), 'test:', p_ordering_key => (n / 5)::text) "
            "FROM generate_series(1, 300) n"
        )
        connection.commit()
        _, *rows = connection.execute("SELECT * FROM custody.outbox_claim('r', 300, '30 s', 10)").fetchall()
        assert len(rows) == 300
        hot = "SELECT pg_stat_get_xact_tuples_hot_updated('custody.outbox'::regclass)"
        assert connection.execute(hot).fetchall() == [(300,)]


@pytest.mark.parametrize("destination", ["jobs", "test:"])
def test_a_plan_that_was_made_early_does_not_walk_through_what_was_published_since(
    database_url: str, db: psycopg.Connection[Any], destination: str
) -> None:
    """While all events are pending the primary key looks as good as the index of what is open; a session keeps its
    plan."""
    with custody.connect(database_url) as c:
        c.create_topic("jobs")
    db.execute(
        "SELECT custody.outbox_write('t', '1', %s, p_ordering_key => (n %% 3)::text) FROM generate_series(1, 3000) n",
        [destination],
    )
    db.execute("VACUUM ANALYZE custody.outbox")
    move = "SELECT custody.take_outbox(h, clock_timestamp(), 100) FROM custody.heads h"
    settle = (
        "SELECT count(*) FROM custody.outbox_settle(%s, %s, array_fill('published'::text, '{100}'), NULL, NULL, 10)"
    )
    for _ in range(25):
        with db.transaction():
            if destination == "jobs":
                moved, done = done_by(db, move)
                assert moved == [(100,)]
            else:
                (_, *rows), done = done_by(db, "SELECT * FROM custody.outbox_claim('r', 100, '30 s', 10)")
                assert db.execute(settle, [rows[0][12], [row[0] for row in rows]]).fetchall() == [(100,)]
    assert_bounded({"outbox": done["outbox"]}, 1000)


@pytest.mark.req("V10")
@pytest.mark.parametrize(
    "verb", ["SELECT * FROM custody.claim('jobs', 'g')", "SELECT * FROM custody.send('jobs', '1')"]
)
def test_events_for_later_cost_claims_and_publishes_nothing(
    database_url: str, db: psycopg.Connection[Any], verb: str
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("jobs")
        c.create_group("jobs", "g")
    later = "SELECT custody.outbox_write('t', '1', 'jobs', p_available_at => now() + interval '1 day')"
    db.execute(f"{later} FROM generate_series(1, 3000)")  # type: ignore[arg-type]  # a text of our own
    db.execute("VACUUM ANALYZE custody.outbox")
    with db.transaction():
        _, done = done_by(db, verb)
    assert sum(done.get("outbox", (0, 0))) <= 1


@pytest.mark.req("V10")
@pytest.mark.parametrize(
    "verb", ["SELECT * FROM custody.claim('jobs', 'g')", "SELECT * FROM custody.send('jobs', '1')"]
)
def test_keys_that_wait_cost_claims_and_publishes_a_window_and_no_more(
    database_url: str, db: psycopg.Connection[Any], verb: str
) -> None:
    """And what does not wait goes on, before all that waits and behind it."""
    with custody.connect(database_url) as c:
        c.create_topic("jobs")
        c.create_group("jobs", "g")
    later = (
        "SELECT custody.outbox_write('t', '1', 'jobs', p_ordering_key => k, p_available_at => now() + interval '1 day')"
    )
    db.execute(f"{later} FROM unnest('{{a,b}}'::text[]) k")  # type: ignore[arg-type]  # texts of our own
    waiting = "SELECT custody.outbox_write('t', '1', 'jobs', p_ordering_key => %s) FROM generate_series(1, %s)"
    for key in ("a", "b", "a"):
        db.execute(waiting, [key, 6000])
    free = "SELECT custody.outbox_write('t', '2', 'jobs', p_ordering_key => k) FROM unnest('{NULL,c,c}'::text[]) k"
    db.execute(free)
    db.execute("VACUUM ANALYZE custody.outbox")
    left = "SELECT count(*) FROM custody.outbox WHERE payload = '2' AND status = 'PENDING'"
    for _ in range(200):
        with db.transaction():
            _, done = done_by(db, verb)
        assert_bounded({"outbox": done["outbox"]}, 2 * 5000 + 8 * 1000)
        if db.execute(left).fetchone() == (0,):
            break
    else:
        pytest.fail("what does not wait was never moved")
