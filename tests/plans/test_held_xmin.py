"""A transaction that is held open keeps every dead row version alive; a claim must not walk over them."""

from __future__ import annotations

import json

import psycopg
import pytest

import custody
from custody import Outgoing, Policy


def pages(connection: psycopg.Connection) -> int:
    """Pages that a claim of ten looks at, everything inside the function included; it is acknowledged."""
    with connection.transaction():
        row = connection.execute(
            "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM custody.claim('t', 'g', 10)"
        ).fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    return int(plan[0]["Plan"]["Shared Hit Blocks"]) + int(plan[0]["Plan"]["Shared Read Blocks"])


@pytest.mark.core
@pytest.mark.req("N9")
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_claim_costs_the_same_after_many_rounds_under_a_held_snapshot(
    database_url: str, db: psycopg.Connection, ordering: str
) -> None:
    rounds = 400
    with custody.connect(database_url) as c, psycopg.connect(database_url) as holder:
        c.create_topic("t")
        c.create_group("t", "g", Policy(ordering=ordering))  # type: ignore[arg-type]  # one of the two
        c.publish_many("t", [Outgoing(n, key=f"k{n % 50}") for n in range(rounds * 10 + 200)])
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT pg_current_xact_id()")
        for _ in range(20):
            c.claim("t", "g", max_messages=10).ack()
        first = min(pages(db) for _ in range(3))
        for lease in list(db.execute("SELECT DISTINCT lease_id FROM custody.leases").fetchall()):
            c.ack(lease[0])
        for _ in range(rounds - 50):
            c.claim("t", "g", max_messages=10).ack()
        last = min(pages(db) for _ in range(3))
        holder.rollback()
    assert last <= first * 1.25, f"{first} pages at first, {last} after {rounds} rounds"
