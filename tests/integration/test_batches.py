"""Messages that share a row of the log: whoever wrote them and whoever reads them, each is as if it had its own."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock

from custody import Custody, Message, Outgoing, Policy
from custody.errors import InvalidPayload
from custody.spark.database import arrow

pytestmark = pytest.mark.core

TOPIC, GROUP = "orders", "g"


def rows(db: psycopg.Connection[Any], topic: str = TOPIC) -> list[int]:
    """The number of messages in each row."""
    found = db.execute(
        "SELECT l.n FROM custody.log l JOIN custody.segments s USING (segment_id) "
        "JOIN custody.topics t USING (topic_id) "
        'WHERE t.name = %s ORDER BY l.partition, l."offset"',
        [topic],
    )
    return [n for (n,) in found.fetchall()]


def some(count: int, start: int = 0) -> list[Outgoing]:
    """Messages of all kinds, with and without keys and headers."""
    payloads: list[Any] = [{"n": start}, f"text {start}", b"\0bytes", "", None, "é" * 50]
    return [
        Outgoing(
            payloads[n % len(payloads)],
            key=None if n % 5 == 0 else f"key-{n % 7}",
            headers={"n": str(n)} if n % 3 == 0 else None,
        )
        for n in range(start, start + count)
    ]


def content(messages: list[Message]) -> list[tuple[Any, ...]]:
    return [(m.offset, m.key, m.payload, m.headers) for m in messages]


def expected(sent: list[Outgoing], first: int = 0) -> list[tuple[Any, ...]]:
    return [(first + n, one.key, one.payload, dict(one.headers or {})) for n, one in enumerate(sent)]


@pytest.fixture
def mixed(c: Custody, db: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """A log of batches, single messages and large ones, in two segments; returns what is in it."""
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(max_attempts=1))
    sent: list[Outgoing] = []
    for count in (20, 1, 3, 1200, 16, 15):
        some_more = some(count, len(sent))
        c.publish_many(TOPIC, some_more)
        sent += some_more
        if count == 3:
            db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    large = [Outgoing("x" * 2000, key="large") for _ in range(20)]
    c.publish_many(TOPIC, large)
    assert rows(db) == [20, 1, 1, 1, 1, 600, 600, 16] + [1] * 35
    return expected(sent + large)


def test_every_part_of_it_reads_alike(c: Custody, mixed: list[tuple[Any, ...]]) -> None:
    chance = random.Random(1)
    for _ in range(60):
        first, count = chance.randrange(len(mixed)), chance.choice([1, 2, 17, 600, 2000])
        assert content(c.read(TOPIC, offset=first, max_messages=count)) == mixed[first : first + count]


@pytest.mark.parametrize("size", [1, 7, 250, 2000])
def test_claims_of_any_size_hand_out_each_once(c: Custody, mixed: list[tuple[Any, ...]], size: int) -> None:
    lease, seen = c.claim(TOPIC, GROUP, max_messages=size), []
    while lease and len(seen) < 300 * size:
        seen += content(list(lease))
        lease = lease.next()
    assert seen == mixed[: len(seen)]
    assert len(seen) == min(len(mixed), 300 * size)


def test_sql_reads_the_same(c: Custody, db: psycopg.Connection[Any], mixed: list[tuple[Any, ...]]) -> None:
    query = 'SELECT "offset", key, payload, headers, payload_kind FROM custody.events WHERE topic = %s ORDER BY 1'
    every = db.execute(query, [TOPIC]).fetchall()
    assert [(offset, key, headers or {}) for offset, key, _, headers, _ in every] == [
        (offset, key, headers) for offset, key, _, headers in mixed
    ]
    between = 'SELECT "offset", key, payload, headers, payload_kind FROM custody.events_between(%s, 0, %s, %s)'
    for first, until in ((0, 1), (19, 25), (100, 700), (1200, 1300)):
        assert db.execute(between, [TOPIC, first, until]).fetchall() == every[first:until]
    assert db.execute("SELECT headers FROM custody.event(%s, 0, 24)", [TOPIC]).fetchall() == [({"n": "24"},)]
    assert db.execute("SELECT * FROM custody.event(%s, 0, 99999)", [TOPIC]).fetchall() == []
    claimed = db.execute("SELECT * FROM custody.claim(%s, %s, 1000)", [TOPIC, GROUP]).fetchall()[1:]
    assert [row[1] for row in claimed] == list(range(1000))


def test_arrow_reads_the_same(database_url: str, mixed: list[tuple[Any, ...]]) -> None:
    def read(**wanted: Any) -> list[dict[str, Any]]:
        return [row for batch in arrow.events(database_url, reads, **wanted) for row in batch.to_pylist()]

    with arrow.Planner(database_url) as planner:
        reads = [read for slice in planner.reads(TOPIC, 0, 0, len(mixed)) for read in slice]
    every = read()
    assert [(row["offset"], row["key"]) for row in every] == [(offset, key) for offset, key, _, _ in mixed]
    for conditions, holds in (
        ([("key", "=", "key-3")], lambda row: row["key"] == "key-3"),
        ([("key", "in", ["key-3", "large"])], lambda row: row["key"] in ("key-3", "large")),
        ([("key", "is null", None)], lambda row: row["key"] is None),
        ([("offset", "in", [3, 30, 31])], lambda row: row["offset"] in (3, 30, 31)),
    ):
        assert read(conditions=conditions) == [row for row in every if holds(row)]
    shares = [read(share=(k, 3)) for k in range(3)]
    assert sorted((row for share in shares for row in share), key=lambda row: row["offset"]) == every
    for k, share in enumerate(shares):
        offsets = [o for b in arrow.offsets(database_url, reads, share=(k, 3)) for o in b.column("offset").to_pylist()]
        assert offsets == [row["offset"] for row in share]
    gaps = {*range(24, 28), 30, *range(100, 900)}
    reads = [(reads[-1][0].removesuffix(" AND n = 1"), "{[24,28),[30,31),[100,900)}")]
    assert read() == [row for row in every if row["offset"] in gaps]


def test_dead_messages_have_copies_of_their_own(
    c: Custody, db: psycopg.Connection[Any], mixed: list[tuple[Any, ...]]
) -> None:
    lease = c.claim(TOPIC, GROUP, max_messages=2000)
    dead = [m for m in lease if m.offset % 97 == 0]
    lease.nack(*dead, error="no")
    lease.ack()
    wanted = [one for one in mixed if one[0] % 97 == 0]
    assert [(d.offset, d.key, d.payload, d.headers) for d in c.dead(TOPIC, GROUP)] == wanted
    db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    assert [dropped for (dropped,) in db.execute("SELECT dropped FROM custody.drop_segments(%s)", [TOPIC])] == [
        True
    ] * 2
    assert [(d.offset, d.key, d.payload, d.headers) for d in c.dead(TOPIC, GROUP)] == wanted
    c.redrive(TOPIC, GROUP)
    again = c.claim(TOPIC, GROUP, max_messages=2000)
    assert [(m.offset, m.key, m.payload) for m in again] == [one[:3] for one in wanted]
    again.ack()
    assert c.dead(TOPIC, GROUP) == []


def test_failures_hold_up_their_keys_within_a_batch(c: Custody) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering="key"))
    c.publish_many(TOPIC, [Outgoing(n, key=f"key-{n % 4}") for n in range(100)])
    lease = c.claim(TOPIC, GROUP, max_messages=10)
    second = c.claim(TOPIC, GROUP, max_messages=10)
    assert not second, "all keys are in flight"
    lease.nack(lease.messages[1], delay="1h")
    lease.ack()
    seen = [m.payload for m in c.claim(TOPIC, GROUP, max_messages=100)]
    assert seen == [n for n in range(10, 100) if n % 4 != 1]


def test_whoever_appends_several_appends_a_batch(c: Custody, db: psycopg.Connection[Any], clock: Clock) -> None:
    for topic in ("due", "committed", "deaths"):
        c.create_topic(topic)
    c.create_group("due", GROUP)
    c.publish_delayed("due", [Outgoing(n, key="k", delay=1) for n in range(50)])
    clock.move(10)
    assert [m.payload for m in c.claim("due", GROUP, max_messages=50)] == list(range(50))
    with c.init_producer("p").transaction() as transaction:
        transaction.publish_many("committed", [Outgoing(n) for n in range(50)])
    c.create_group("deaths", GROUP, Policy(max_attempts=1, dead_letter="topic"))
    c.publish_many("deaths", [Outgoing(n) for n in range(50)])
    c.claim("deaths", GROUP, max_messages=50).nack(error="no")
    for topic in ("due", "committed", "deaths", "deaths-dlq"):
        assert rows(db, topic) == [50], topic
    assert [m.payload for m in c.read("deaths-dlq")] == list(range(50))


def test_what_a_row_refuses_a_batch_refuses(c: Custody, db: psycopg.Connection[Any]) -> None:
    c.create_topic(TOPIC)
    with pytest.raises(InvalidPayload, match="2,000 bytes"):
        c.publish_many(TOPIC, [*some(20), Outgoing(1, key="x" * 2001)])
    append = (
        "SELECT custody.append(%s, '{0}', '{16}', %s, '{j}', '{}', '{}', p_joined => %s, p_ends => %s, p_of => 1, "
        "p_priorities => false)"
    )
    given = [TOPIC, ["x" * 2001] * 16, b"1" * 16, list(range(1, 17))]
    with pytest.raises(psycopg.errors.CheckViolation, match="key_length"):
        db.execute(append, given)
    assert rows(db) == []


def test_a_long_publish_is_all_or_none(c: Custody, db: psycopg.Connection[Any]) -> None:
    c.create_topic(TOPIC, partitions=2)
    receipts = c.publish_many(TOPIC, some(10_500))
    stored = {(p, m.offset): m.payload for p in (0, 1) for m in c.read(TOPIC, p, max_messages=20_000)}
    assert [stored[r.partition, r.offset] for r in receipts] == [one.payload for one in some(10_500)]
    assert max(rows(db)) <= 1000
