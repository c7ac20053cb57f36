"""The SQL views: what is in the log, what is not plainly done, what is dead, in flight, blocked, and what happened."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, keyed, start

from custody import Constant, Custody, Outcome, Outgoing, Policy
from custody.errors import TopicNotFound

pytestmark = pytest.mark.core

DELIVERIES = (
    "topic, partition, event_offset, consumer_group, key, status, attempts, run_at, locked_at, locked_by, last_error, "
    "updated_at"
)
VIEWS = ("events", "deliveries", "dead_letters", "in_flight", "blocked_keys", "history")


def rows(db: psycopg.Connection[Any], view: str, order: str = "topic") -> list[dict[str, Any]]:
    query = psycopg.sql.SQL("SELECT * FROM {} ORDER BY {}").format(
        psycopg.sql.Identifier("custody", view), psycopg.sql.Identifier(order)
    )
    with db.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        return cursor.execute(query).fetchall()


def in_the_past(clock: Clock) -> None:
    """Views go by the server's clock: what is leased then has expired for them."""
    clock.time = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.mark.req("V6")
def test_the_docs_have_every_view_with_its_columns(db: psycopg.Connection[Any]) -> None:
    page = (Path(__file__).parents[2] / "docs/sql.md").read_text(encoding="utf-8")
    described = {
        view: re.findall(r"`(\w+)`", columns)
        for view, columns in re.findall(r"^\| `(\w+)` \| each .*? \| (.*) \|$", page, re.MULTILINE)
    }
    real = db.execute(
        "SELECT table_name, array_agg(column_name::text ORDER BY ordinal_position) FROM information_schema.columns "
        "WHERE table_schema = 'custody' AND table_name = ANY (%s) GROUP BY 1",
        [[*VIEWS, "group_state", "outbox_events"]],
    ).fetchall()
    assert described == dict(real)


@pytest.mark.req("V6")
def test_events_show_every_message(c: Custody, db: psycopg.Connection, clock: Clock) -> None:
    c.create_topic(TOPIC)
    c.publish(TOPIC, {"n": 1}, key="k", headers={"h": "x"})
    c.publish(TOPIC, "text")
    found = rows(db, "events", "offset")
    assert [(row["topic"], row["partition"], row["offset"], row["key"]) for row in found] == [
        (TOPIC, 0, 0, "k"),
        (TOPIC, 0, 1, None),
    ]
    assert [(row["payload"], row["payload_kind"]) for row in found] == [('{"n":1}', "json"), ("text", "text")]
    assert (found[0]["headers"], found[0]["published_at"]) == ({"h": "x"}, clock.time)


@pytest.mark.req("V6")
def test_no_payload_breaks_a_view(c: Custody, db: psycopg.Connection) -> None:
    payloads: list[Any] = ["a\0b", b"\x00\xff\xfe", {"k\0": "\0"}, "🦉", b"", "", None, "\\", b"\\x00", 2**70, "\x01"]
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(max_attempts=1))
    c.publish_many(TOPIC, payloads)
    lease = c.claim(TOPIC, GROUP, max_messages=100)
    lease.nack(error="dead")
    events = rows(db, "events", "offset")
    letters = rows(db, "dead_letters", "offset")
    assert len(events) == len(letters) == len(payloads)
    assert [row["payload"] for row in events] == [row["payload"] for row in letters]
    assert events[0]["payload"] == "a\\000b"
    assert events[1]["payload"] == "\\000\\377\\376"
    assert [letter.payload for letter in c.dead(TOPIC, GROUP)] == payloads
    assert db.execute("SELECT count(*) FROM custody.events WHERE payload LIKE '%🦉%'").fetchone() == (1,)


@pytest.mark.req("V6")
def test_deliveries_have_exactly_the_documented_columns(db: psycopg.Connection) -> None:
    cursor = db.execute("SELECT * FROM custody.deliveries")
    assert cursor.description is not None
    assert ", ".join(column.name for column in cursor.description) == DELIVERIES


@pytest.mark.req("V6", "V1")
def test_deliveries_show_each_message_that_is_not_plainly_done_once(
    c: Custody, db: psycopg.Connection, clock: Clock
) -> None:
    start(c, policy=Policy(ordering="key", max_attempts=2, backoff=Constant("10s")), keys="abcdefga")
    lease = c.claim(TOPIC, GROUP, max_messages=7)
    c.settle(
        lease.lease_id,
        {
            0: Outcome("nack", error="a failed"),
            1: Outcome("dead", error="b is bad"),
            2: Outcome("later", delay="5s"),
            3: Outcome("release"),
            4: Outcome("ack"),
        },
    )
    drained = c.claim(TOPIC, GROUP)  # takes the released one, d
    assert [m.key for m in drained] == ["d"]
    c.claim(TOPIC, GROUP)  # parks the second a
    found = {row["event_offset"]: row for row in rows(db, "deliveries", "event_offset")}
    now = clock.time
    expected = {
        0: ("a", "ready", 1, now + timedelta(seconds=10), None, None, "a failed"),
        1: ("b", "dead", 1, None, None, None, "b is bad"),
        2: ("c", "ready", 0, now + timedelta(seconds=5), None, None, None),
        3: ("d", "processing", 1, None, now, "test", None),
        5: ("f", "processing", 1, None, now, "test", None),
        6: ("g", "processing", 1, None, now, "test", None),
        7: ("a", "ready", 0, now, None, None, None),
    }
    names = ("key", "status", "attempts", "run_at", "locked_at", "locked_by", "last_error")
    assert {offset: tuple(row[name] for name in names) for offset, row in found.items()} == expected
    assert {(row["topic"], row["partition"], row["consumer_group"]) for row in found.values()} == {(TOPIC, 0, GROUP)}


@pytest.mark.req("C2", "V6")
def test_an_expired_lease_shows_as_ready_before_anybody_folds_it(
    c: Custody, db: psycopg.Connection, clock: Clock
) -> None:
    in_the_past(clock)
    start(c, 3)
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    assert rows(db, "in_flight") == []
    found = rows(db, "deliveries", "event_offset")
    assert [(row["status"], row["attempts"], row["run_at"], row["last_error"]) for row in found] == [
        ("ready", 1, lease.deadline, "lease expired")
    ] * 3
    clock.move(60)
    c.claim(TOPIC, GROUP)
    assert len(rows(db, "deliveries")) == 3


@pytest.mark.req("V6")
def test_dead_letters_are_a_query_over_deliveries_and_events(c: Custody, db: psycopg.Connection, clock: Clock) -> None:
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP, Policy(max_attempts=1))
    for n in range(4):
        c.publish(TOPIC, {"n": n}, partition=n % 2)
    for _ in range(2):
        lease = c.claim(TOPIC, GROUP, max_messages=9)
        lease.nack(lease.messages[1], error="bad")
        lease.ack()
    joined = db.execute(
        """
        SELECT e.payload::jsonb ->> 'n', d.attempts, d.last_error, d.updated_at
        FROM custody.deliveries d
        JOIN custody.events e ON e.topic = d.topic AND e.partition = d.partition AND e."offset" = d.event_offset
        WHERE d.status = 'dead' AND d.consumer_group = %s ORDER BY 1
        """,
        [GROUP],
    ).fetchall()
    assert joined == [("2", 1, "bad", clock.time), ("3", 1, "bad", clock.time)]
    short = db.execute(
        "SELECT payload::jsonb ->> 'n', attempts, last_error, died_at FROM custody.dead_letters ORDER BY 1"
    )
    assert short.fetchall() == joined


@pytest.mark.req("V6", "V3")
def test_a_dead_letter_tells_everything_about_its_death(c: Custody, db: psycopg.Connection, clock: Clock) -> None:
    start(c, keys="k")
    first = clock.time
    for error in ("one", "two", "three"):
        c.claim(TOPIC, GROUP).nack(error=error)
        clock.move(60)
    (row,) = rows(db, "dead_letters")
    assert (row["topic"], row["consumer_group"], row["partition"], row["offset"], row["key"]) == (
        TOPIC,
        GROUP,
        0,
        0,
        "k",
    )
    assert (row["attempts"], row["failures"], row["reason"]) == (3, 3, "max_retries_exceeded")
    assert (row["last_error"], row["errors"]) == ("three", ["attempt 1: one", "attempt 2: two", "attempt 3: three"])
    assert (row["first_delivery"], row["first_failure"], row["died_at"]) == (first, first, first + timedelta(minutes=2))
    (letter,) = c.dead(TOPIC, GROUP)
    assert (letter.key, letter.payload, letter.attempts, letter.died_at) == ("k", "k", 3, row["died_at"])


@pytest.mark.req("V6")
def test_in_flight_shows_the_live_leases(c: Custody, db: psycopg.Connection) -> None:
    start(c, 5)
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    (row,) = rows(db, "in_flight")
    assert (row["topic"], row["consumer_group"], row["partition"], row["messages"]) == (TOPIC, GROUP, 0, 3)
    assert (row["lease_id"], row["worker"], row["deadline"]) == (lease.lease_id, "test", lease.deadline)
    lease.ack()
    assert rows(db, "in_flight") == []


@pytest.mark.req("K8")
def test_blocked_keys_in_sql_are_those_of_the_verb(c: Custody, db: psycopg.Connection) -> None:
    start(c, policy=Policy(ordering="key"), keys="aabb")
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    lease.nack(lease.messages[0], error="x")
    (row,) = rows(db, "blocked_keys")
    (blocked,) = c.blocked_keys(TOPIC, GROUP)
    assert (row.pop("topic"), row.pop("consumer_group")) == (TOPIC, GROUP)
    assert row == {name: getattr(blocked, name) for name in row}
    assert (blocked.key, blocked.parked, blocked.why, blocked.worker) == ("a", 1, "backoff", "test")


@pytest.mark.req("K8")
def test_a_key_of_which_only_delivered_messages_wait_says_since_when(c: Custody, clock: Clock) -> None:
    start(c, policy=Policy(ordering="key", visibility_timeout="10s"), keys="a" * 20)
    c.claim(TOPIC, GROUP, max_messages=20)
    clock.move(11)
    lease = c.claim(TOPIC, GROUP, max_messages=20)
    assert [message.attempt for message in lease] == [2, 2]
    lease.nack(lease.messages[0], delay="1h")
    c.skip(TOPIC, GROUP, 0, 0)
    (blocked,) = c.blocked_keys(TOPIC, GROUP)
    assert (blocked.key, blocked.parked, blocked.since) == ("a", 1, clock.time)


@pytest.mark.req("V3")
def test_history_records_every_transition_with_time_worker_and_error(
    c: Custody, db: psycopg.Connection, clock: Clock
) -> None:
    start(c, 1, Policy(max_attempts=2, backoff=Constant("1s")))
    begin = clock.time
    c.claim(TOPIC, GROUP).nack(error="first")
    clock.move(1)
    lease = c.claim(TOPIC, GROUP)
    lease.extend("1m")
    lease.nack(error="second")
    c.redrive(TOPIC, GROUP, reason="why not")
    c.claim(TOPIC, GROUP).ack()
    entries = c.trace(TOPIC, 0, 0)
    assert [(entry.kind, entry.attempt, entry.error) for entry in entries] == [
        ("claim", 1, None),
        ("nack", 1, "first"),
        ("claim", 2, None),
        ("extend", 2, None),
        ("dead", 2, "second"),
        ("redrive", None, "why not"),
        ("claim", 1, None),
        ("ack", 1, None),
    ]
    assert [entry.at for entry in entries] == [begin] * 2 + [clock.time] * 6
    assert {entry.worker for entry in entries} == {"test"}
    assert entries[3].lease_id == lease.lease_id
    view = [row for row in rows(db, "history", "entry") if row["kind"] != "start"]
    assert [row["kind"] for row in view] == [entry.kind for entry in entries]
    assert {(row["topic"], row["consumer_group"], row["partition"]) for row in view} == {(TOPIC, GROUP, 0)}


@pytest.mark.req("V3", "V1")
def test_a_trace_is_of_one_message_in_every_group_or_in_one(c: Custody) -> None:
    start(c, 3)
    c.create_group(TOPIC, "other")
    c.claim(TOPIC, GROUP, max_messages=3).ack()
    c.claim(TOPIC, "other").nack(error="only here")
    both = c.trace(TOPIC, 0, 0)
    assert [(entry.group, entry.kind) for entry in both] == [
        (GROUP, "claim"),
        (GROUP, "ack"),
        ("other", "claim"),
        ("other", "nack"),
    ]
    assert [entry.kind for entry in c.trace(TOPIC, 0, 0, group="other")] == ["claim", "nack"]
    assert [entry.group for entry in c.trace(TOPIC, 0, 2)] == [GROUP, GROUP]
    assert c.trace(TOPIC, 0, 99) == []
    with pytest.raises(TopicNotFound):
        c.trace("ordres", 0, 0)


@pytest.mark.req("V3")
def test_a_trace_shows_each_message_its_own_error(c: Custody) -> None:
    start(c, 4)
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    c.settle(
        lease.lease_id,
        {
            0: Outcome("nack", error="zero"),
            1: Outcome("nack", error="one"),
            2: Outcome("nack"),
            3: Outcome("dead", error="three"),
        },
    )
    assert [c.trace(TOPIC, 0, n)[-1].error for n in range(4)] == ["zero", "one", None, "three"]


@pytest.mark.req("V3")
def test_a_trace_does_not_give_one_error_to_a_message_without(c: Custody) -> None:
    start(c, 2)
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    c.settle(lease.lease_id, {0: Outcome("nack", error="zero"), 1: Outcome("nack")})
    assert [c.trace(TOPIC, 0, n)[-1].error for n in range(2)] == ["zero", None]


@pytest.mark.req("V3", "K1")
def test_a_trace_shows_waiting_behind_a_key(c: Custody) -> None:
    start(c, policy=Policy(ordering="key"), keys="aa")
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    lease.nack(lease.messages[0])
    keyed(c, "a")
    c.claim(TOPIC, GROUP)
    assert [entry.kind for entry in c.trace(TOPIC, 0, 1)] in (
        ["claim", "release", "park"],
        ["claim", "park", "release"],
    )
    assert [entry.kind for entry in c.trace(TOPIC, 0, 2)] == ["park"]


@pytest.mark.req("V6")
def test_every_view_can_be_read_while_everything_is_going_on(c: Custody, db: psycopg.Connection, clock: Clock) -> None:
    in_the_past(clock)
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP, Policy(ordering="key", max_attempts=2, on_dead="hold", backoff=Constant("1s")))
    c.create_group(TOPIC, "bare", bare=True)
    c.publish_many(TOPIC, [Outgoing(n, key=f"k{n % 5}") for n in range(100)])
    for n in range(30):
        lease = c.claim(TOPIC, GROUP, max_messages=7)
        if lease and n % 3 == 0:
            lease.nack(lease.messages[len(lease) // 2], error="x")
        elif lease and n % 3 == 1:
            lease.release(lease.messages[-1])
        clock.move(3)
        db.execute("SELECT custody.seal_segment(%s)", [TOPIC]) if n % 10 == 5 else None
        for view in VIEWS:
            rows(db, view)
    seen = [(row["partition"], row["event_offset"]) for row in rows(db, "deliveries")]
    assert len(seen) == len(set(seen)), "no message is listed twice"


@pytest.mark.req("V6")
def test_no_view_looks_so_costly_that_it_is_compiled(c: Custody, db: psycopg.Connection) -> None:
    for view in VIEWS:
        query = psycopg.sql.SQL("EXPLAIN (FORMAT JSON) SELECT * FROM {}").format(
            psycopg.sql.Identifier("custody", view)
        )
        explained = db.execute(query).fetchone()
        assert explained is not None
        assert explained[0][0]["Plan"]["Total Cost"] < 50_000, view
