"""Processes killed, and connections cut, in the middle of transactions: no part is ever seen, nothing comes twice."""

from __future__ import annotations

import random
import time
from collections import Counter

import psycopg
import pytest
from tests.chaos.conftest import Spawn, kill
from tests.waiting import wait_for

import custody


@pytest.mark.req("G12")
@pytest.mark.parametrize(("messages", "kills"), [(1500, 6), pytest.param(30_000, 60, marks=pytest.mark.long)])
def test_a_transaction_is_whole_whoever_is_killed(
    database_url: str, db: psycopg.Connection, spawn: Spawn, messages: int, kills: int
) -> None:
    chance = random.Random(7)
    with custody.connect(database_url) as c:
        for topic in ("in", "left", "right"):
            c.create_topic(topic, partitions=3)
        c.create_group("in", "g", custody.Policy(visibility_timeout="2s", max_attempts=1000, max_ack_holes=None))
        c.publish_many("in", [custody.Outgoing(n, key=f"k{n % 50}") for n in range(messages)])
        ours = [pid for (pid,) in db.execute("SELECT pid FROM pg_stat_activity")]
        worker = spawn("transactor.py", database_url, "w0")
        for number in range(kills):
            done = (number + 1) * messages // (kills + 2)
            wait_for(lambda: c.topic("left").message_count >= done, "the transactions stand still", 60)  # noqa: B023
            time.sleep(chance.uniform(0, 0.02))  # at any point of one
            if number % 2:
                db.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name = 'custody' AND datname = current_database() AND pid <> ALL (%s)",
                    [ours],
                )
            else:
                kill(worker)
                worker = spawn("transactor.py", database_url, f"w{number + 1}")
            seen = [dict(counted(c, topic)) for topic in ("right", "left")]
            assert {n: count for n, count in seen[0].items() if count != 3} == {}
            assert {n: count for n, count in seen[1].items() if count != 1} == {}
        wait_for(lambda: c.stats("in", "g").depth == 0, lambda: f"left over: {c.stats('in', 'g')}", 120)
        assert counted(c, "left") == dict.fromkeys(range(messages), 1)
        assert counted(c, "right") == dict.fromkeys(range(messages), 3)
        kill(worker)


def counted(c: custody.Custody, topic: str) -> Counter[int]:
    """How often each message of the source is there; offsets have no gap."""
    found: Counter[int] = Counter()
    for partition, tail in enumerate(c.topic(topic).tails):
        read = c.read(topic, partition, max_messages=tail + 1000)
        assert [message.offset for message in read] == list(range(len(read)))
        found.update(message.payload if topic == "left" else message.payload[0] for message in read)
    return found
