"""What a verb reads does not grow with the log nor with the open cases.

EXPLAIN does not look into functions, so these tests count what a verb really did: rows read by sequential scans and
through indexes, for each table, in its own transaction.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from tests.plans.conftest import CASES, EVENTS

pytestmark = pytest.mark.core

Work = dict[str, tuple[int, int]]
SMALL = (
    "topics",
    "groups",
    "heads",
    "cursors",
    "segments",
    "segment_bounds",
)  # a handful of rows: a scan is the best plan


def work(connection: psycopg.Connection) -> Work:
    """Rows read so far in this transaction, for each table: by sequential scans, and through an index."""
    rows = connection.execute(
        "SELECT relname, coalesce(seq_tup_read, 0), coalesce(idx_tup_fetch, 0) "
        "FROM pg_stat_xact_user_tables WHERE schemaname = 'custody'"
    ).fetchall()
    return {name: (scanned, fetched) for name, scanned, fetched in rows if name not in SMALL}


def done_by(connection: psycopg.Connection, query: str, *arguments: Any) -> tuple[list[tuple[Any, ...]], Work]:
    before = work(connection)
    rows = connection.execute(query, arguments).fetchall()
    after = work(connection)
    return rows, {
        name: (scanned - before.get(name, (0, 0))[0], fetched - before.get(name, (0, 0))[1])
        for name, (scanned, fetched) in after.items()
    }


def assert_bounded(done: Work, most: int) -> None:
    too_much = {name: rows for name, rows in done.items() if sum(rows) > most}
    assert not too_much, f"rows (scanned, fetched by index) beyond {most}: {too_much}"


@pytest.mark.req("N1")
@pytest.mark.parametrize("group", ["plain", "ordered", "troubled"])
def test_a_claim_reads_only_what_it_hands_out(big: psycopg.Connection, group: str) -> None:
    rows, done = done_by(big, "SELECT * FROM custody.claim('big', %s, 100)", group)
    assert len(rows) == 101
    # an ordered claim beside open cases reads the keys once more, and looks at 200 and 500 cases whether they are few
    assert_bounded(done, 720)


@pytest.mark.req("N1")
def test_a_claim_looks_at_the_end_of_the_log_only_when_it_comes_near(big: psycopg.Connection) -> None:
    big.execute("SET LOCAL track_functions = 'all'")
    calls = "SELECT coalesce(pg_stat_get_xact_function_calls('custody.tail(custody.heads)'::regprocedure), 0)"
    looks = []
    for most in (100, 100, EVENTS - 300, 100, 100):
        big.execute("SELECT custody.claim('big', 'plain', %s)", [most])
        looks.extend(big.execute(calls).fetchall())
    assert [look for (look,) in looks] == [1, 1, 1, 1, 2]


@pytest.mark.req("N1", "K7")
def test_a_claim_beside_open_cases_probes_the_keys_of_its_batch_only(big: psycopg.Connection) -> None:
    _, done = done_by(big, "SELECT * FROM custody.claim('big', 'troubled', 100)")
    assert sum(done["cases"]) <= 200 + 500 + 10


@pytest.mark.req("N1", "K7")
def test_a_claim_of_many_cases_of_one_key_reads_no_more_of_them_than_it_hands_out(big: psycopg.Connection) -> None:
    big.execute("UPDATE custody.cases SET key = 'hot', state = 'parked' WHERE \"offset\" < 5000")
    big.execute("UPDATE custody.cases SET state = 'waiting', run_at = '2020-01-01', failures = 0 WHERE \"offset\" = 0")
    rows, done = done_by(big, "SELECT * FROM custody.claim('big', 'troubled', 400)")
    assert [row[1] for row in rows[1:202]] == [*range(200), CASES], "half of the lease, and what is fresh"
    # found, marked and handed out; and the first 200 and 500 cases, to see whether they are few
    assert sum(done["cases"]) <= 3 * 200 + 200 + 500 + 20


@pytest.mark.req("N1")
def test_acknowledging_a_lease_reads_no_event(big: psycopg.Connection) -> None:
    rows, _ = done_by(big, "SELECT * FROM custody.claim('big', 'ordered', 1000)")
    settled, done = done_by(big, "SELECT (custody.ack_lease(%s)).settled", rows[0][0]["lease_id"])
    assert settled == [(1000,)]
    assert_bounded(done, 5)


@pytest.mark.req("N1")
def test_settling_one_failure_reads_the_lease_only(big: psycopg.Connection) -> None:
    rows, _ = done_by(big, "SELECT * FROM custody.claim('big', 'troubled', 100)")
    _, done = done_by(
        big, "SELECT custody.settle(%s, %s, %s, %s)", rows[0][0]["lease_id"], [rows[50][1]], ["nack"], ["boom"]
    )
    assert_bounded(done, 250)
    assert sum(done["cases"]) <= 10


@pytest.mark.req("N1", "N3")
@pytest.mark.parametrize("busy", ["plain", "ordered"])
def test_a_failure_under_a_breaker_reads_the_newest_of_a_long_history(big: psycopg.Connection, busy: str) -> None:
    """However much of it is too old to count, and whether it is the group's own or another one's."""
    big.execute("UPDATE custody.groups SET breaker_rate = 0.5 WHERE name = 'plain'")
    big.execute(
        "INSERT INTO custody.journal (at, kind, group_id, partition, offsets) "
        "SELECT '2020-01-01', 'ack', g.group_id, 0, '{[0,1)}' "
        "FROM custody.groups g, generate_series(1, 100000) WHERE g.name = %s",
        [busy],
    )
    big.execute("ANALYZE custody.journal")
    rows, _ = done_by(big, "SELECT * FROM custody.claim('big', 'plain', 10)")
    _, done = done_by(big, "SELECT custody.settle(%s, %s, %s)", rows[0][0]["lease_id"], [rows[1][1]], ["nack"])
    assert_bounded(done, 250)
    state = big.execute("SELECT breaker_state FROM custody.groups WHERE name = 'plain'").fetchone()
    assert state == ("closed",)


@pytest.mark.req("N1", "C6")
def test_counting_what_is_parked_reads_no_other_case(big: psycopg.Connection) -> None:
    big.execute("UPDATE custody.groups SET max_parked = 100 WHERE name = 'troubled'")
    big.execute("UPDATE custody.cases SET state = 'parked' WHERE \"offset\" BETWEEN 50000 AND 50019")
    _, done = done_by(big, "SELECT * FROM custody.claim('big', 'troubled', 100)")
    assert sum(done["cases"]) <= 200 + 500 + 50


@pytest.mark.req("N1")
def test_reading_by_offset_and_by_time_uses_the_primary_key(big: psycopg.Connection) -> None:
    _, done = done_by(big, "SELECT * FROM custody.read('big', 0, 150000, 100)")
    assert_bounded(done, 110)
    offset, done = done_by(big, "SELECT custody.offset_for_time('big', 0, '2030-01-01 00:02:00Z')")
    assert offset == [(120_000,)]
    assert_bounded(done, 60)


@pytest.mark.req("N1")
def test_publishing_reads_one_event(big: psycopg.Connection) -> None:
    _, done = done_by(big, "SELECT * FROM custody.send('big', '1')")
    assert_bounded(done, 5)


def test_publishing_by_a_plan_of_an_empty_segment_reads_one_event(big: psycopg.Connection) -> None:
    big.execute("SELECT custody.create_topic('grown')")
    publish = "SELECT * FROM custody.publish('grown', '{0,0}', '{k,k}', '{j,j}', ARRAY['1'::bytea, '2'], '{NULL,NULL}')"
    for _ in range(10):  # so often that the plans are kept
        big.execute(publish)
    big.execute(
        "INSERT INTO custody.log SELECT h.segment_id, 0, n, now(), 'k', 'j', '1' FROM custody.heads h "
        "JOIN custody.topics t USING (topic_id), generate_series(20, 40000) n WHERE t.name = 'grown'"
    )
    found, done = done_by(big, publish)
    assert [offset for _, offset, _ in found] == [40001, 40002]
    assert_bounded(done, 5)


@pytest.mark.req("V6")
def test_dead_letters_are_found_without_reading_the_log(big: psycopg.Connection) -> None:
    big.execute(
        "UPDATE custody.cases SET state = 'dead', dead_reason = 'rejected', last_error = 'x', published_at = now(), "
        "kind = 't', payload = 'payload' "
        'WHERE "offset" IN (5, 50000, 59999)'
    )
    big.execute("ANALYZE custody.cases")
    found, done = done_by(big, "SELECT payload FROM custody.dead_letters WHERE consumer_group = 'troubled'")
    assert len(found) == 3
    assert_bounded(done, 50)
    found, done = done_by(
        big,
        "SELECT e.payload, d.attempts, d.last_error, d.updated_at "
        "FROM custody.deliveries d, custody.event(d.topic, d.partition, d.event_offset) e "
        "WHERE d.consumer_group = 'troubled' AND d.status = 'dead' ORDER BY d.updated_at DESC",
    )
    assert len(found) == 3
    assert_bounded(done, 50)


@pytest.mark.req("V6")
def test_a_filter_on_the_status_prunes_the_other_branches(big: psycopg.Connection) -> None:
    plan = "\n".join(
        row[0] for row in big.execute("EXPLAIN SELECT * FROM custody.deliveries WHERE status = 'dead'").fetchall()
    )
    assert "leases" not in plan
    assert "returned" not in plan
    assert "parked" not in plan


@pytest.mark.req("V11", "N1")
def test_a_claim_of_a_bound_group_looks_at_a_bounded_stretch(big: psycopg.Connection) -> None:
    big.execute("SELECT custody.bind('big', 'plain', %s)", ('["orders.*", {"headers": {"region": "eu"}}]',))
    rows, done = done_by(big, "SELECT * FROM custody.claim('big', 'plain', 100)")
    assert (len(rows), rows[0][0]["reason"]) == (1, "busy")
    log = {name: read for name, read in done.items() if name.startswith("log_")}
    assert all(scanned == 0 and fetched <= 10_100 for scanned, fetched in log.values()), log
    assert_bounded({name: read for name, read in done.items() if name not in log}, 10)


@pytest.mark.req("V11", "N1")
def test_a_claim_of_a_bound_group_stops_where_it_has_enough(big: psycopg.Connection) -> None:
    big.execute('UPDATE custody.log SET headers = \'{"x-custody-routing-key": "orders.eu"}\' WHERE "offset" < 500')
    big.execute("SELECT custody.bind('big', 'plain', %s)", ('["orders.*"]',))
    rows, done = done_by(big, "SELECT * FROM custody.claim('big', 'plain', 100)")
    assert len(rows) == 101
    assert_bounded(done, 250)  # looked at once, and read once


PARKED = 20_000


def park_much(big: psycopg.Connection, *, awaited: bool) -> None:
    """Messages parked behind their keys, in a table that the planner has only seen empty."""
    big.execute(
        "INSERT INTO custody.parked "
        "SELECT g.group_id, 0, 'key-' || 10000 + n %% 1000 * 10, n, int8multirange(int8range(n, n + 1)), 1, now() "
        "FROM custody.groups g, generate_series(100000, 100000 + %s - 1) n WHERE g.name = 'ordered'",
        [PARKED],
    )
    if awaited:
        big.execute(
            "INSERT INTO custody.awaited (group_id, partition, key) "
            "SELECT g.group_id, 0, 'key-' || 10000 + n * 10 "
            "FROM custody.groups g, generate_series(0, 99) n WHERE g.name = 'ordered'"
        )


@pytest.mark.req("N1", "K1")
def test_parking_reads_no_runs_of_other_keys(big: psycopg.Connection) -> None:
    big.execute("SET LOCAL plan_cache_mode = force_generic_plan")  # as in a session that has claimed for long
    park_much(big, awaited=False)
    big.execute("SELECT * FROM custody.claim('big', 'ordered', 10050)")
    _, done = done_by(big, "SELECT * FROM custody.claim('big', 'ordered', 50)")
    # beyond the 200 and 500 that tell whether few keys are open
    assert sum(done["parked"]) <= 200 + 500 + 200


@pytest.mark.req("N1", "K1")
@pytest.mark.parametrize("fairness", [None, "key"])
def test_a_claim_of_parked_messages_reads_the_first_runs_of_their_keys(
    big: psycopg.Connection, fairness: str | None
) -> None:
    big.execute("UPDATE custody.groups SET fairness = %s WHERE name = 'ordered'", [fairness])
    park_much(big, awaited=True)
    rows, done = done_by(big, "SELECT * FROM custody.claim('big', 'ordered', 40)")
    assert len(rows) == 41
    assert sum(done["parked"]) <= 4 * 500 + 10 * 100


@pytest.mark.req("N1", "K1")
def test_a_claim_reads_no_key_in_flight_for_one_that_waits_behind_it(big: psycopg.Connection) -> None:
    big.execute("UPDATE custody.cases SET state = 'dead', dead_reason = 'rejected', kind = 't', payload = 'payload'")
    big.execute("UPDATE custody.groups SET max_parked = 1 WHERE name = 'ordered'")
    big.execute("SELECT * FROM custody.claim('big', 'ordered', 5000)")
    big.execute("UPDATE custody.log SET key = 'key-1' WHERE \"offset\" BETWEEN 5000 AND 5009")
    big.execute("SELECT * FROM custody.claim('big', 'ordered', 5)")
    rows, done = done_by(big, "SELECT * FROM custody.claim('big', 'ordered', 5)")
    assert rows[0][0]["reason"] == "max_parked"
    assert sum(sum(read) for name, read in done.items() if name.startswith("log_")) <= 5
