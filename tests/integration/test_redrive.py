"""Redrive and discard: chosen by a filter, tried dry, recorded with who and why."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, offsets, start

from custody import Custody, Outcome, Outgoing, Policy
from custody.errors import GroupNotFound, InvalidArgument

pytestmark = pytest.mark.core


@pytest.fixture
def dead(c: Custody, clock: Clock) -> Custody:
    """Six dead letters: two partitions, two keys, three errors, a minute apart."""
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP, Policy(max_attempts=1))
    for n in range(6):
        c.publish(TOPIC, n, key="ab"[n % 2], partition=n // 3, allow_split=True)
        c.claim(TOPIC, GROUP).nack(error=["timeout: 5%", "timeout \\ 'x'", "bad, {json}"][n % 3])
        clock.move(60)
    return c


EVERY = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.req("V8", "N4")
def test_a_dry_run_shows_and_changes_nothing(dead: Custody, db: psycopg.Connection) -> None:
    before = everything(db)
    assert dead.redrive(TOPIC, GROUP, dry_run=True) == EVERY
    assert dead.discard(TOPIC, GROUP, where_error="timeout%", dry_run=True) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert everything(db) == before


@pytest.mark.req("V8", "N4")
def test_the_filters_choose_and_may_be_combined(dead: Custody, clock: Clock) -> None:
    def chosen(**which: Any) -> list[tuple[int, int]]:
        return dead.redrive(TOPIC, GROUP, dry_run=True, **which)

    begin = clock.time - timedelta(minutes=6)
    assert chosen(where_error="timeout%") == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert chosen(where_error="%{json}") == [(0, 2), (1, 2)]
    assert chosen(where_error="timeout \\\\ 'x'") == [(0, 1), (1, 1)]
    assert chosen(where_error="bad, {json}") == [(0, 2), (1, 2)]
    assert chosen(where_error="nothing%") == []
    assert chosen(key="a") == [(0, 0), (0, 2), (1, 1)]
    assert chosen(partition=1) == [(1, 0), (1, 1), (1, 2)]
    assert chosen(partition=0, offsets=[2, 0, 99]) == [(0, 0), (0, 2)]
    assert chosen(partition=0, offsets=[]) == []
    assert chosen(died_from=begin + timedelta(minutes=4)) == [(1, 1), (1, 2)]
    assert chosen(died_until=begin + timedelta(minutes=1)) == [(0, 0)]
    assert chosen(died_from=begin + timedelta(minutes=1), died_until=begin + timedelta(minutes=3)) == [(0, 1), (0, 2)]
    assert chosen(limit=2) == [(0, 0), (0, 1)]
    assert chosen(where_error="timeout%", key="b", limit=5) == [(0, 1), (1, 0)]


@pytest.mark.req("V8", "G20")
def test_a_filter_that_cannot_be_is_refused_with_a_suggestion(dead: Custody, db: psycopg.Connection) -> None:
    before = everything(db)
    with pytest.raises(InvalidArgument, match="Did you mean 'where_error'"):
        dead.redrive(TOPIC, GROUP, where_eror="x")
    with pytest.raises(InvalidArgument, match="Give the partition"):
        dead.discard(TOPIC, GROUP, offsets=[1])
    with pytest.raises(InvalidArgument, match="at least 1"):
        dead.redrive(TOPIC, GROUP, limit=0)
    with pytest.raises(InvalidArgument, match="time zone"):
        dead.redrive(TOPIC, GROUP, died_from=datetime(2030, 1, 1))
    with pytest.raises(GroupNotFound):
        dead.redrive(TOPIC, "nobody")
    assert everything(db) == before


@pytest.mark.req("V8")
def test_a_redriven_message_is_ready_at_once_with_a_fresh_budget(c: Custody, clock: Clock) -> None:
    start(c, 2, Policy(max_attempts=2))
    for _ in range(2):
        c.claim(TOPIC, GROUP, max_messages=2).nack(error="e")
        clock.move(60)
    assert c.redrive(TOPIC, GROUP, partition=0, offsets=[1]) == [(0, 1)]
    for attempt in (1, 2):
        lease = c.claim(TOPIC, GROUP, max_messages=2)
        assert [(m.offset, m.attempt) for m in lease] == [(1, attempt)]
        lease.nack(error=f"again {attempt}")
        clock.move(60)
    letters = {letter.offset: letter for letter in c.dead(TOPIC, GROUP)}
    assert letters[0].errors == ("attempt 1: e", "attempt 2: e")
    assert (letters[1].attempts, letters[1].errors) == (2, ("attempt 1: again 1", "attempt 2: again 2"))


@pytest.mark.req("V8", "V3")
def test_the_journal_has_who_and_why(dead: Custody, clock: Clock) -> None:
    dead.redrive(TOPIC, GROUP, key="a", reason="the bank is back")
    entry = dead.trace(TOPIC, 0, 0)[-1]
    assert (entry.kind, entry.worker, entry.error, entry.at) == ("redrive", "test", "the bank is back", clock.time)
    assert dead.trace(TOPIC, 0, 1)[-1].kind == "dead"


@pytest.mark.req("V8")
def test_redriving_all_empties_the_dead_letters(dead: Custody) -> None:
    assert dead.redrive(TOPIC, GROUP) == EVERY
    assert dead.dead(TOPIC, GROUP) == []
    assert len(drain(dead)) == 6
    assert dead.redrive(TOPIC, GROUP) == []


@pytest.mark.req("V1", "V8")
def test_a_redrive_is_of_one_group(c: Custody) -> None:
    start(c, 1, Policy(max_attempts=1))
    c.create_group(TOPIC, "other", Policy(max_attempts=1))
    for group in (GROUP, "other"):
        c.claim(TOPIC, group).nack()
    c.redrive(TOPIC, GROUP)
    assert (len(c.dead(TOPIC, GROUP)), len(c.dead(TOPIC, "other"))) == (0, 1)


@pytest.mark.req("V7", "V8")
def test_a_discarded_message_is_done_with_a_record(dead: Custody, clock: Clock) -> None:
    assert dead.discard(TOPIC, GROUP, where_error="bad%", reason="never valid") == [(0, 2), (1, 2)]
    assert [(letter.partition, letter.offset) for letter in dead.dead(TOPIC, GROUP)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    entry = dead.trace(TOPIC, 1, 2)[-1]
    assert (entry.kind, entry.worker, entry.error) == ("discard", "test", "never valid")
    assert drain(dead) == []
    assert dead.stats(TOPIC, GROUP).depth == 0


@pytest.mark.req("K8")
def test_discarding_a_held_message_frees_its_key(c: Custody) -> None:
    start(c, policy=Policy(ordering="key", max_attempts=1, on_dead="hold"), keys="aa")
    c.claim(TOPIC, GROUP).nack()
    assert not c.claim(TOPIC, GROUP)
    c.discard(TOPIC, GROUP)
    assert offsets(drain(c)) == [1]


@pytest.mark.req("K8", "V8")
def test_redriving_a_held_message_lets_its_key_go_on_after_it(c: Custody) -> None:
    start(c, policy=Policy(ordering="key", max_attempts=1, on_dead="hold"), keys="aab")
    c.claim(TOPIC, GROUP).nack()
    assert offsets(drain(c)) == [2]
    c.redrive(TOPIC, GROUP)
    first = c.claim(TOPIC, GROUP)
    assert offsets(first) == [0]
    assert not c.claim(TOPIC, GROUP)
    first.ack()
    assert offsets(drain(c)) == [1]


@pytest.mark.req("V8")
def test_a_thousand_dead_letters_are_listed_and_redriven_at_once(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP)
    c.publish_many(TOPIC, [Outgoing(n) for n in range(1500)])
    lease = c.claim(TOPIC, GROUP, max_messages=1500)
    c.settle(lease.lease_id, {n: Outcome("dead", error=f"e{n % 3}") for n in range(1500)})
    assert len(c.dead(TOPIC, GROUP)) == 1000, "the limit of a listing"
    assert len(c.dead(TOPIC, GROUP, limit=2000)) == 1500
    assert len(c.redrive(TOPIC, GROUP, where_error="e1")) == 500
    assert len(drain(c, max_messages=1000)) == 500
    kinds = db.execute("SELECT count(*) FROM custody.journal WHERE kind = 'redrive'").fetchone()
    assert kinds == (1,)
