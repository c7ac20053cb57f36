"""The journal in parts: it goes by its own retention, its entries keep their order, and a shortened story says so."""

from __future__ import annotations

import random
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, fill, start

from custody import Breaker, Custody, Outgoing, Policy
from custody.errors import InvalidArgument
from custody.model.outcomes import Outcome

pytestmark = pytest.mark.core

HOUR = 3600
PART = 2**40


def did(c: Custody) -> list[str]:
    return [one.did for one in c.maintain() if one.topic is None]


def entries(db: psycopg.Connection[Any]) -> list[int]:
    return [entry for (entry,) in db.execute("SELECT entry FROM custody.journal ORDER BY entry")]


@pytest.mark.req("V13")
def test_by_default_the_journal_is_one_part_and_stays(c: Custody, db: Any, clock: Clock) -> None:
    start(c, 5)
    drain(c)
    clock.move(1e8)
    before = everything(db)
    assert c.maintain() == []
    assert everything(db) == before
    assert [(part.part, part.sealed_at) for part in c.journal().parts] == [(0, None)]


@pytest.mark.req("V13")
def test_the_journal_goes_by_time(c: Custody, db: Any, clock: Clock) -> None:
    start(c)
    c.set_journal_retention(time="10h")
    for _ in range(25):
        fill(c, 2)
        drain(c)
        clock.move(HOUR)
        c.maintain()
    journal = c.journal()
    assert 10 <= len(journal.parts) <= 12
    assert journal.dropped_until is not None
    oldest = db.execute("SELECT min(at) FROM custody.journal").fetchone()[0]
    assert 9 * HOUR <= (clock() - oldest).total_seconds() <= 11.5 * HOUR
    assert journal.dropped_until <= oldest
    found = entries(db)
    assert found[0] // PART == journal.parts[0].part, "an entry is in the part of its number"
    times = [at for (at,) in db.execute("SELECT at FROM custody.journal ORDER BY entry")]
    assert times == sorted(times), "entries are numbered in their order, over the parts"
    tables = db.execute("SELECT count(*) FROM pg_class WHERE relname ~ '^journal_[0-9]+$' AND relkind = 'r'").fetchone()
    assert tables == (len(journal.parts),)


@pytest.mark.req("V13")
def test_the_journal_goes_by_size(c: Custody, clock: Clock) -> None:
    start(c)
    c.set_journal_retention(size="2MB")
    noise = random.Random(0)
    for _ in range(12):
        c.publish_many(TOPIC, [Outgoing(1) for _ in range(60)])
        lease = c.claim(TOPIC, GROUP, max_messages=60)
        c.settle(lease.lease_id, {m.offset: Outcome("reject", error=noise.randbytes(8000).hex()) for m in lease})
        clock.move(HOUR)
        assert "opened" not in did(c)
        assert sum(part.bytes for part in c.journal().parts) < 4.5 * 2**20
    assert c.journal().parts[0].part > 0


@pytest.mark.req("V13")
def test_a_trace_says_where_its_beginning_is_gone(c: Custody, clock: Clock) -> None:
    start(c, 1)
    c.claim(TOPIC, GROUP).nack(error="first", delay="3h")
    c.set_journal_retention(time="1h")
    for _ in range(3):
        clock.move(HOUR)
        c.maintain()
    fill(c, 1)
    drain(c)
    first, *rest = c.trace(TOPIC, 0, 0)
    assert (first.kind, first.at) == ("forgotten", c.journal().dropped_until)
    assert [entry.kind for entry in rest] == ["claim", "ack"]
    assert [entry.kind for entry in c.trace(TOPIC, 0, 1)] == ["claim", "ack"], "this one came later: nothing is missing"
    assert c.trace(TOPIC, 0, 7) == [], "there is no such message"
    assert c.trace(TOPIC, 0, 0, group=GROUP)[0].group == GROUP


@pytest.mark.req("V13")
def test_what_a_breaker_counts_is_not_dropped(c: Custody, clock: Clock) -> None:
    start(c, 1, Policy(breaker=Breaker(window="5h")))
    c.set_journal_retention(time="1h")
    clock.move(HOUR)
    assert did(c) == ["sealed"]
    clock.move(3 * HOUR)
    assert "dropped" not in did(c)
    clock.move(3 * HOUR)
    assert "dropped" in did(c)


@pytest.mark.req("V13")
def test_an_open_transaction_puts_the_seal_off_and_nobody_waits(c: Custody, db: Any, clock: Clock) -> None:
    """Its statement may have begun before the new part was there, and would find no place for its entry."""
    start(c, 3)
    c.set_journal_retention(time="10h")
    lease = c.claim(TOPIC, GROUP)
    clock.move(HOUR)
    with psycopg.connect(c.database_url) as mine:
        lease = c.claim(TOPIC, GROUP, visibility_timeout="9h")
        lease.ack(connection=mine)
        assert did(c) == ["busy"]
        assert len(c.journal().parts) == 2, "the next part is there, and not yet used"
        c.claim(TOPIC, GROUP).ack()
        assert max(entries(db)) < PART
    assert did(c) == ["sealed"]
    fill(c, 1)
    drain(c)
    assert max(entries(db)) >= PART


@pytest.mark.req("V13")
def test_a_long_reader_puts_the_drop_off(c: Custody, clock: Clock) -> None:
    start(c, 3)
    c.set_journal_retention(time="1h")
    clock.move(HOUR)
    c.maintain()
    clock.move(HOUR)
    with psycopg.connect(c.database_url) as reader:
        reader.execute("SELECT count(*) FROM custody.history")
        assert did(c) == ["busy"]
        assert [part.part for part in c.journal().parts] == [0, 1]
        assert len(drain(c)) == 3
    assert "dropped" in did(c)


@pytest.mark.req("V13")
def test_steps_within_one_transaction_or_rolled_back_lose_no_entry(c: Custody, db: Any, clock: Clock) -> None:
    start(c, 3)
    c.set_journal_retention(time="10h")
    clock.move(HOUR)
    step = "SELECT did FROM custody.maintain_journal(%s)"
    with db.transaction():
        assert db.execute(step, [clock()]).fetchall() == [("opened",)]
        assert db.execute(step, [clock()]).fetchall() == [("busy",)], "nobody else can see that part yet"
        assert len(c.claim(TOPIC, GROUP)) == 1
    with db.transaction(force_rollback=True):
        assert db.execute(step, [clock()]).fetchall() == [("sealed",)]
    assert len(c.claim(TOPIC, GROUP)) == 1
    assert max(entries(db)) >= PART, "the sequence has moved on nevertheless"
    assert did(c) == []
    assert [part.sealed_at is None for part in c.journal().parts] == [False, True]


def test_bad_settings_are_refused(c: Custody, db: Any) -> None:
    before = c.journal()
    for bad in ({"time": 0}, {"size": 0}, {"size": "much"}, {"time": "-1s"}):
        with pytest.raises(InvalidArgument):
            c.set_journal_retention(**bad)  # type: ignore[arg-type]
    with pytest.raises(psycopg.Error):
        db.execute("SELECT custody.set_journal_retention('-1 s')")
    assert c.journal() == before
    c.set_journal_retention(time="1h", size="1MB")
    assert (c.journal().keep_time, c.journal().keep_size) != (None, None)
    c.set_journal_retention()
    assert c.journal() == before


def test_a_kind_that_nobody_knows_is_refused(db: Any) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        db.execute("INSERT INTO custody.journal (at, kind, group_id) VALUES (now(), 'nonsense', 1)")
    db.execute("INSERT INTO custody.journal (at, kind, group_id) VALUES (now(), 'drop', 1)")
