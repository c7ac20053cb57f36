"""Workers killed with -9 in the middle of their work: nothing lost, out of order, or settled by the dead."""

from __future__ import annotations

import subprocess
from collections import Counter
from functools import partial
from uuid import UUID

import psycopg
import pytest
from tests.chaos.conftest import Ledger, Spawn, kill, out_of_order
from tests.order_rule import audit
from tests.waiting import wait_for

import custody
from custody.errors import LeaseLost
from custody.model.lifecycle import MessageState

TOPIC = "orders"
GROUP = "stock"


def holds_a_lease(db: psycopg.Connection, worker: str) -> bool:
    query = "SELECT EXISTS (SELECT FROM custody.in_flight WHERE worker = %s)"
    return db.execute(query, (worker,)).fetchone() == (True,)


def reached(ledger: Ledger, effects: float, workers: dict[str, subprocess.Popen[str]]) -> bool:
    assert [name for name, worker in workers.items() if worker.poll() is not None] == [], "these have ended too early"
    return len(ledger) >= effects


@pytest.mark.core
@pytest.mark.req("K2", "V5")
@pytest.mark.parametrize(
    "messages", [1500, pytest.param(4000, marks=pytest.mark.long), pytest.param(20_000, marks=pytest.mark.long)]
)
def test_four_workers_on_one_partition_two_of_them_killed(
    database_url: str, db: psycopg.Connection, ledger: Ledger, spawn: Spawn, messages: int
) -> None:
    """50 keys, random failures; the ledger, not Custody, proves that every key went in order and nothing is missing."""
    with custody.connect(database_url) as c:
        c.create_topic(TOPIC)
        keys = {n: f"key {n * 7919 % 50}" for n in range(messages)}
        c.publish_many(TOPIC, [custody.Outgoing({"n": n}, key=key) for n, key in keys.items()])
        c.create_group(
            TOPIC,
            GROUP,
            custody.Policy(ordering="key", max_attempts=6, backoff=custody.Exponential("10ms", cap="100ms")),
        )
        workers = {
            name: spawn("ledger_worker.py", database_url, TOPIC, GROUP, name, "1s", 0.05)
            for name in ("a", "b", "c", "d")
        }
        for name, share in (("a", 0.2), ("b", 0.5)):
            wait_for(
                partial(reached, ledger, messages * share, workers),
                lambda: f"the workers stand still at {len(ledger)}: {c.stats(TOPIC, GROUP)}",
                timeout=120,
            )
            wait_for(partial(holds_a_lease, db, name), f"worker {name} has nothing in flight")
            kill(workers.pop(name))
        workers["e"] = spawn("ledger_worker.py", database_url, TOPIC, GROUP, "e", "1s", 0.05)  # for one of the two
        for worker in workers.values():
            assert worker.wait(180) == 0

        dead = {letter.offset for letter in c.dead(TOPIC, GROUP)}
        effects = ledger.effects()
        done = {offset for offset, _, _, _ in effects}
        assert done | dead == set(keys), "lost"
        assert out_of_order(effects, dead, keys) == []
        # more than once only where a later delivery says so
        repeated = Counter(offset for offset, _, _, _ in effects)
        for offset, count in repeated.items():
            attempts = [attempt for each, _, attempt, _ in effects if each == offset]
            assert len(set(attempts)) == count, f"offset {offset} was done twice in one delivery: {attempts}"
        verdict = audit(db, TOPIC, GROUP)
        assert verdict.violations == []
        assert verdict.count(MessageState.DONE) == messages - len(dead)
        assert {entry for entry, state in verdict.states.items() if state is MessageState.DEAD} == dead


@pytest.mark.core
@pytest.mark.req("V5", "C3", "G14")
def test_a_killed_claimer_costs_only_the_visibility_timeout(
    database_url: str, db: psycopg.Connection, spawn: Spawn
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic(TOPIC)
        c.publish_many(TOPIC, [custody.Outgoing(n, key=f"key {n}") for n in range(100)])
        c.create_group(TOPIC, GROUP, custody.Policy(ordering="key"))
        process = spawn("claimer.py", database_url, TOPIC, GROUP, "2s")
        assert process.stdout is not None
        lease_id, count = process.stdout.readline().split()
        assert count == "100"
        kill(process)
        assert not c.claim(TOPIC, GROUP, max_messages=100)
        again: dict[int, int] = {}

        def take() -> bool:
            lease = c.claim(TOPIC, GROUP, max_messages=100, visibility_timeout="60s")
            again.update({message.offset: message.attempt for message in lease})
            return len(again) == 100

        # ten leases of ten, none before the deadline
        wait_for(take, lambda: f"only {len(again)} were delivered again")
        assert set(again.values()) == {2}
        before = c.stats(TOPIC, GROUP)
        journal = db.execute("SELECT max(entry) FROM custody.journal").fetchone()
        for late in (
            lambda: c.ack(UUID(lease_id)),
            lambda: c.ack(UUID(lease_id), [0, 1]),
            lambda: c.nack(UUID(lease_id), [0]),
            lambda: c.extend(UUID(lease_id), "60s"),
        ):
            with pytest.raises(LeaseLost):
                late()
        assert c.stats(TOPIC, GROUP).in_flight == before.in_flight == 100
        assert db.execute("SELECT max(entry) FROM custody.journal").fetchone() == journal


@pytest.mark.req("C4")
def test_a_message_that_kills_its_worker_dies_alone(database_url: str, spawn: Spawn) -> None:
    """1 of 1,000 ends its process: it is dead of expiry in the end, and the other 999 are done."""
    with custody.connect(database_url) as c:
        c.create_topic(TOPIC)
        c.publish_many(TOPIC, ["poison" if n == 617 else n for n in range(1000)])
        c.create_group(TOPIC, GROUP, custody.Policy(max_attempts=2))
        deaths = 0
        while spawn("poisoned_worker.py", database_url, TOPIC, GROUP, "400ms").wait(30) != 0:
            deaths += 1
            assert deaths < 10, c.stats(TOPIC, GROUP)
        assert deaths == 5  # with 1,000 others' company, with 100, with 10, and twice alone
        (letter,) = c.dead(TOPIC, GROUP)
        assert (letter.offset, letter.reason, letter.attempts) == (617, "lease_expired", 5)
        stats = c.stats(TOPIC, GROUP)
        assert (stats.depth, stats.dead) == (0, 1)
