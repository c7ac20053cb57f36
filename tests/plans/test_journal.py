"""A journal in many parts is read as one: from its end, a bounded number of rows."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from tests.plans.test_plans import done_by

from custody import Breaker, Custody, Policy

pytestmark = pytest.mark.core

PARTS, GROUPS, ROWS = 20, 10, 5000


@pytest.fixture
def long_journal(c: Custody, db: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
    """Ten groups with five hundred entries each in each of twenty parts."""
    c.create_topic("orders")
    for n in range(GROUPS):
        c.create_group("orders", f"group-{n}", Policy(breaker=Breaker(window="1000d")))
    c.set_journal_retention(size="100GB")
    for part in range(1, PARTS + 1):
        db.execute(
            """INSERT INTO custody.journal (at, kind, group_id, partition, offsets, lease_id)
               SELECT '2029-12-31', 'ack', g.group_id, 0, '{[1,2)}', gen_random_uuid()
               FROM generate_series(1, %s) n, custody.groups g WHERE g.group_id %% 10 = n %% 10""",
            [ROWS],
        )
        if part < PARTS:
            db.execute("SELECT custody.open_part(%s, now())", [part])
            db.execute("SELECT custody.move_on(%s, now())", [part])
    db.execute("VACUUM ANALYZE")
    return db


# Where a group has much of the journal, walking it back over the other groups' entries is a good plan, too.
QUERIES = {
    "the breaker's look at recent outcomes": (
        "SELECT custody.failing(g, '2030-01-01') FROM custody.groups g WHERE g.name = 'group-3'",
        200 + PARTS,
    ),
    "handling times": ("SELECT * FROM custody.handling_times('orders', 'group-3', 10)", 1000 * GROUPS + PARTS),
    "the last of a group": (
        """SELECT * FROM custody.journal WHERE group_id = (SELECT group_id FROM custody.groups WHERE name = 'group-3')
           AND partition = 0 ORDER BY entry DESC LIMIT 10""",
        10 * GROUPS + PARTS,
    ),
}


@pytest.mark.req("V13", "N1")
def test_the_end_of_a_long_journal_is_read_and_no_more(long_journal: psycopg.Connection[Any]) -> None:
    for what, (query, most) in QUERIES.items():
        with long_journal.transaction():
            rows, done = done_by(long_journal, query)
        assert rows, what
        read = sum(sum(counts) for name, counts in done.items() if name.startswith("journal_"))
        assert read <= most + 10, f"{what}: {read} rows of the journal: {done}"
