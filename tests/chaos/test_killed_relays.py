"""Three relays at once, killed with -9 at every moment that matters: nothing lost, order kept, few duplicates."""

from __future__ import annotations

import itertools
import signal
import subprocess
from collections import Counter
from typing import Any

import psycopg
import pytest
from tests.chaos.conftest import Ledger, Spawn, out_of_order
from tests.waiting import wait_for

import custody
from custody.outbox import Outbox

MOMENTS = ("claimed", "published", "settling")
SIZES = [600, pytest.param(10_000, marks=pytest.mark.long)]
KEYS = 30


def written(url: str, events: int, destination: str) -> dict[int, str]:
    keys = {n: f"key {n * 7919 % KEYS}" for n in range(events)}
    with psycopg.connect(url) as connection:
        for n, key in keys.items():
            custody.outbox.write(connection, event_type="e", payload=n, destination=destination, ordering_key=key)
    return keys


def survived(spawn: Spawn, url: str, target: str, kills: int) -> Counter[str]:
    """Runs three relays; each that dies is replaced, until so many have died. Returns the deaths by moment."""
    moments = itertools.cycle(MOMENTS)
    numbers = itertools.count()
    deaths: Counter[str] = Counter()
    running: dict[subprocess.Popen[str], str] = {}

    def start() -> None:
        started = len(deaths) + len(running)
        moment = next(moments) if sum(deaths.values()) + len(running) < kills else "never"
        number = next(numbers)
        running[spawn("mortal_relay.py", url, f"relay {number}", target, moment, 1 + started % 3)] = moment

    for _ in range(3):
        start()

    def step() -> bool:
        for process, moment in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[process]
            if code == -signal.SIGKILL:
                deaths[moment] += 1
                start()
            else:
                assert code == 0, f"a relay failed with {code}"
        return not running

    wait_for(step, lambda: f"{len(running)} relays still run after {deaths} deaths", timeout=240)
    return deaths


@pytest.mark.req("O8", "O10")
@pytest.mark.parametrize("events", SIZES)
def test_nothing_is_lost_and_the_order_of_keys_is_kept(
    database_url: str, db: psycopg.Connection[Any], ledger: Ledger, spawn: Spawn, events: int
) -> None:
    keys = written(database_url, events, "chaos:")
    deaths = survived(spawn, database_url, "ledger", kills=6)
    assert set(deaths) == set(MOMENTS), f"not every death was died: {deaths}"
    effects = ledger.effects()
    assert {n for n, _, _, _ in effects} == set(keys), "lost"
    assert out_of_order(effects, set(), keys) == []
    # twice only where an attempt was counted in between: the first had expired
    twice = Counter((n, attempt) for n, _, attempt, _ in effects)
    assert {pair: count for pair, count in twice.items() if count > 1} == {}
    states = db.execute("SELECT status, count(*) FROM custody.outbox GROUP BY 1").fetchall()
    assert states == [("PUBLISHED", events)]


@pytest.mark.req("O8", "O9", "O10")
@pytest.mark.parametrize("events", SIZES)
def test_into_another_custody_each_event_arrives_once(
    database_url: str, db: psycopg.Connection[Any], spawn: Spawn, events: int
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("orders", partitions=3)
        keys = written(database_url, events, "chaos:orders")
        deaths = survived(spawn, database_url, "orders", kills=6)
        assert set(deaths) == set(MOMENTS), f"not every death was died: {deaths}"
        messages = [m for p in range(3) for m in c.read("orders", p, max_messages=events)]
    assert sorted(m.payload for m in messages) == sorted(keys)
    for key in set(keys.values()):
        got = [m.payload for m in messages if m.key == key]
        assert got == sorted(got), f"{key} is out of order"
    with Outbox(database_url) as outbox:
        assert outbox.events(states=["PENDING", "CLAIMED", "DEAD"]) == []


@pytest.mark.req("X4", "O6", "O8", "O10")
def test_an_event_that_kills_its_relay_dies_alone(
    database_url: str, db: psycopg.Connection[Any], ledger: Ledger, spawn: Spawn
) -> None:
    """99 others were in its batch, some of them of its key."""
    keys = written(database_url, 300, "chaos:")
    killer = 150

    def relayed() -> int:
        process = spawn("mortal_relay.py", database_url, "relay", "ledger", "event", killer)
        code = process.wait(60)
        assert code in (0, -signal.SIGKILL), f"a relay failed with {code}"
        return code

    deaths = 0
    while relayed() != 0:
        deaths += 1
        assert deaths <= 2 + 3, "a claim of 100, one of 10, and three of the event alone should have been enough"
    assert deaths == 5
    left = db.execute(
        "SELECT convert_from(payload, 'UTF8')::int, status, crashes FROM custody.outbox WHERE status <> 'PUBLISHED'"
    ).fetchall()
    assert left == [(killer, "DEAD", 3)]
    effects = ledger.effects()
    assert {n for n, _, _, _ in effects} == set(keys) - {killer}
    assert out_of_order(effects, {killer}, keys) == []
