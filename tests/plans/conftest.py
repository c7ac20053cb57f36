"""One big partition for all plan tests: 200,000 events, and 60,000 open cases in a group of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql
from tests.conftest import url_of

import custody

EVENTS = 200_000
CASES = 60_000


@pytest.fixture(scope="session")
def big_url(server_url: str, template: str) -> Iterator[str]:
    name = f"custody_big_{os.getpid()}"
    url = url_of(server_url, name)
    with psycopg.connect(server_url, autocommit=True) as server:
        create = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY FILE_COPY")
        server.execute(create.format(sql.Identifier(name), sql.Identifier(template)))
        with custody.connect(url) as c:
            c.create_topic("big")
            for group, ordering in (("plain", "none"), ("ordered", "key"), ("troubled", "key")):
                c.create_group("big", group, custody.Policy(ordering=ordering, max_ack_holes=None))
        with psycopg.connect(url, autocommit=True) as connection:
            segment = connection.execute("SELECT segment_id FROM custody.heads").fetchone()
            assert segment is not None
            # as publishing would have written them, only faster
            connection.execute(
                sql.SQL(
                    "INSERT INTO custody.log SELECT {}, 0, n, '2030-01-01'::timestamptz + n * interval '1 ms', "
                    "'key-' || n % 50000, 't', 'payload of a usual size, more or less', NULL "
                    "FROM generate_series(0, {} - 1) n"
                ).format(segment[0], EVENTS)
            )
            connection.execute(
                sql.SQL(
                    "INSERT INTO custody.cases "
                    '(group_id, partition, "offset", key, state, attempts, failures, run_at, updated_at) '
                    "SELECT g.group_id, 0, n, 'open-' || n, 'waiting', 1, 1, '2999-01-01', now() "
                    "FROM custody.groups g, generate_series(0, {} - 1) n WHERE g.name = 'troubled'"
                ).format(CASES)
            )
            connection.execute(
                sql.SQL(
                    "UPDATE custody.frontiers f SET frontier = {} FROM custody.groups g "
                    "WHERE g.group_id = f.group_id AND g.name = 'troubled'"
                ).format(CASES)
            )
            connection.execute("VACUUM ANALYZE")
        yield url
        server.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def big(big_url: str) -> Iterator[psycopg.Connection]:
    """A connection whose work is rolled back at the end."""
    with psycopg.connect(big_url) as connection:
        yield connection
        connection.rollback()
