"""Four processes that do every verb at random, killed and stopped again and again: every promise is audited after it.

The ledgers `sent` and `done` are the processes' own. What the tables of Custody say is compared with them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter

import psycopg
import pytest
from tests.chaos.conftest import Spawn, kill
from tests.chaos.mixed_verbs import TOPICS
from tests.order_rule import audit
from tests.waiting import wait_for

import custody
from custody.model.lifecycle import MessageState

GROUPS = ("ordered", "loose", "bound")
PARTITIONS = 3
Place = tuple[str, str, int, int]
"""Topic, group, partition, offset."""

_LEDGERS = """
CREATE TABLE sent (id text NOT NULL PRIMARY KEY, topic text NOT NULL, partition int, "offset" bigint);
CREATE TABLE done (topic text NOT NULL, "group" text NOT NULL, partition int NOT NULL, "offset" bigint NOT NULL);
"""
_ACKED = """
SELECT t.name, g.name, j.partition, o
FROM custody.journal j JOIN custody.groups g USING (group_id) JOIN custody.topics t USING (topic_id)
CROSS JOIN LATERAL unnest(j.offsets) AS r CROSS JOIN LATERAL generate_series(lower(r), upper(r) - 1) AS o
WHERE j.kind = 'ack' AND j.worker <> 'drain'
"""
_DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"


def create(c: custody.Custody) -> None:
    c.create_topic("orders-dlq")  # older than its topic: its head comes before the others in the order of locks
    c.create_topic("results")
    common = {"max_attempts": 4, "backoff": custody.Exponential("10ms", cap="200ms"), "max_ack_holes": None}
    for topic in TOPICS:
        c.create_topic(topic, partitions=PARTITIONS)
        dead_letter = "topic" if topic == "orders" else "keep"
        c.create_group(topic, "ordered", custody.Policy(ordering="key", dead_letter=dead_letter, **common))
        c.create_group(topic, "loose", custody.Policy(dead_letter=dead_letter, **common))
        c.create_group(topic, "bound", custody.Policy(ordering="key", on_dead="hold", **common), bindings=["eu.*"])


def storm(db: psycopg.Connection, spawn: Spawn, url: str, seconds: float) -> tuple[int, int]:
    """Runs four processes for that long, and kills, stops or cuts off one of them at a time. Returns how many were
    killed, and how many steps the survivors made."""
    dice = random.Random(11)
    ours = [pid for (pid,) in db.execute("SELECT pid FROM pg_stat_activity")]
    lives = {name: started(spawn("mixed_verbs.py", url, name)) for name in "abcd"}
    killed, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(dice.uniform(0.2, 1.5))  # at any point of any verb
        name = dice.choice(sorted(lives))
        assert lives[name].poll() is None, f"process {name} ended by itself"
        match dice.choice(["kill", "kill", "stop", "cut"]):
            case "kill":
                kill(lives.pop(name))
                killed += 1
                name = f"{name[0]}{killed}"
                lives[name] = started(spawn("mixed_verbs.py", url, name))
            case "stop":
                os.kill(lives[name].pid, signal.SIGSTOP)
                time.sleep(dice.uniform(0.2, 1.5))
                os.kill(lives[name].pid, signal.SIGCONT)
            case "cut":
                db.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> ALL (%s) AND random() < 0.5",
                    [ours],
                )
    return killed, sum(ended(process) for process in lives.values())


def started(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def ended(process: subprocess.Popen[str]) -> int:
    """Ends a process after its current step; the number of steps that it made."""
    assert process.stdout is not None
    process.terminate()
    assert process.wait(60) == 0
    return int(process.stdout.read())


def drain(c: custody.Custody, topic: str, group: str) -> bool:
    """One round over what is left, whatever it waits for. True when everything is resolved, and nothing is to come."""
    to_come = c.delayed_count(topic)
    while lease := c.claim(topic, group, max_messages=1000):
        lease.ack()
    for blocked in c.blocked_keys(topic, group):
        c.release_key(topic, group, blocked.key)
    return to_come == 0 and c.stats(topic, group).depth == 0


def in_the_log(c: custody.Custody, topic: str) -> dict[tuple[int, int], custody.Message]:
    """Every message by partition and offset; offsets have no gap."""
    found = {}
    for partition, tail in enumerate(c.topic(topic).tails):
        read = c.read(topic, partition, max_messages=tail + 1000)
        assert [message.offset for message in read] == list(range(len(read)))
        found.update({(partition, message.offset): message for message in read})
    return found


@pytest.mark.req("X1", "K2")
@pytest.mark.parametrize("seconds", [8, pytest.param(600, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_every_promise_holds_whoever_is_killed(
    database_url: str, db: psycopg.Connection, spawn: Spawn, seconds: float
) -> None:
    db.execute(_LEDGERS)
    with custody.connect(database_url, worker="drain") as c:
        create(c)
        killed, steps = storm(db, spawn, database_url, seconds)
        for topic in TOPICS:
            for group in GROUPS:
                c.resume(topic, group)
                wait_for(
                    lambda: drain(c, topic, group),  # noqa: B023
                    lambda: f"{topic} of {group} is not drained: {c.stats(topic, group)}",  # noqa: B023
                    60,
                )
        print(f"{killed} killed, {steps} steps of the survivors, {[c.topic(topic).message_count for topic in TOPICS]}")

        for topic in TOPICS:
            log = in_the_log(c, topic)
            ids = Counter(m.payload["id"] for m in log.values() if "x-custody-replayed-from" not in m.headers)
            assert {name: count for name, count in ids.items() if count > 1} == {}, "published twice"
            sent = db.execute('SELECT id, partition, "offset" FROM sent WHERE topic = %s', [topic]).fetchall()
            assert len(sent) > 10 * seconds
            assert [name for name, _, _ in sent if name not in ids] == [], "lost"
            moved = [name for name, *place in sent if place[1] is not None and log[*place].payload["id"] != name]
            assert moved == [], "not where its receipt says"
            for group in GROUPS:
                for partition in range(PARTITIONS):
                    verdict = audit(db, topic, group, partition, hold=group == "bound")
                    assert verdict.violations == [] or group == "loose"
                    there = {offset for number, offset in log if number == partition}
                    resolved = (MessageState.DONE, MessageState.DEAD)
                    unresolved = {o for o, state in verdict.states.items() if state not in resolved}
                    assert there ^ set(verdict.states) == set(), "not handed out, or not in the log"
                    assert unresolved == set()

        acked = Counter[Place](db.execute(_ACKED).fetchall())
        effects = Counter[Place](db.execute("SELECT * FROM done").fetchall())
        effects.update(tuple(message.payload) for message in in_the_log(c, "results").values())
        assert (acked - effects, effects - acked) == (Counter(), Counter()), "acks and their effects differ"
        assert db.execute(_DEADLOCKS).fetchone() == (0,)
