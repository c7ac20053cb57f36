"""What a server does for many callers takes its locks in the same order as everybody else: nobody deadlocks."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from typing import Literal

import psycopg
import pytest
from tests.extent import EXAMPLES
from tests.interleaving.conftest import Make
from tests.interleaving.session import Session

import custody
from custody.coalesced import Ack, Claim, Publish
from custody.engine.server_verbs import ServerVerbs
from custody.errors import Busy, CustodyError, LeaseLost
from custody.model.entities import Outgoing

pytestmark = pytest.mark.core

TOPICS = ("a", "b", "c")
ROUNDS = 10 * EXAMPLES


def deadlocks(db: psycopg.Connection) -> int:
    db.execute("SELECT pg_stat_clear_snapshot()")
    return int(db.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").fetchone()[0])


def outgoing(random: random.Random) -> tuple[str, Outgoing]:
    delay = "1ms" if random.random() < 0.2 else None
    return random.choice(TOPICS), Outgoing(random.random(), partition=random.randrange(3), delay=delay)


def storm(acts: list[Callable[[random.Random], None]], seed: int) -> list[BaseException]:
    """Every act in two threads at once, round after round."""
    failures: list[BaseException] = []

    def run(act: Callable[[random.Random], None], number: int) -> None:
        own = random.Random(seed + number)
        try:
            for _ in range(ROUNDS):
                act(own)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=[act, n]) for n, act in enumerate(acts * 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return failures


@pytest.mark.req("C5")
def test_publishes_of_every_kind_at_once(database_url: str, db: psycopg.Connection) -> None:
    with custody.connect(database_url, pool_size=20) as c:
        verbs = ServerVerbs(c)
        for topic in TOPICS:
            c.create_topic(topic, partitions=3)
        before = deadlocks(db)
        counted = threading.Lock()
        sent = 0
        producers = threading.local()

        def count(messages: int) -> None:
            nonlocal sent
            with counted:
                sent += messages

        def together(random: random.Random) -> None:
            callers = [
                Publish(messages=[outgoing(random) for _ in range(random.randint(1, 4))])
                for _ in range(random.randint(1, 6))
            ]
            for answer in verbs.publish_each(callers):
                assert not isinstance(answer, CustodyError), answer
                count(len(answer))

        def idempotent(random: random.Random) -> None:
            if not hasattr(producers, "mine"):
                producers.mine = [[f"{threading.get_ident()} {n}", 0] for n in range(3)]
                for name, _ in producers.mine:
                    c.init_producer(name)
            random.shuffle(producers.mine)
            callers = [
                Publish(messages=[outgoing(random)], producer=(name, 1, sequence)) for name, sequence in producers.mine
            ]
            for mine, answer in zip(producers.mine, verbs.publish_each(callers), strict=True):
                assert not isinstance(answer, CustodyError), answer
                mine[1] += 1
                count(1)

        def alone(random: random.Random) -> None:
            topic = random.choice(TOPICS)
            count(len(c.publish_many(topic, [Outgoing(n, partition=n % 3) for n in range(random.choice([3, 90]))])))

        def in_transaction(random: random.Random) -> None:
            if not hasattr(producers, "own"):
                producers.own = c.init_producer(f"transactions of {threading.get_ident()}")
            with producers.own.transaction() as tx:
                for _ in range(4):
                    topic, message = outgoing(random)
                    tx.publish_many(topic, [message])
            count(4)

        assert storm([together, idempotent, alone, in_transaction], 7) == []
        assert deadlocks(db) == before
        waiting = sum(c.delayed_count(topic) for topic in TOPICS)
        assert sum(c.topic(topic).message_count for topic in TOPICS) + waiting == sent


@pytest.mark.req("C5")
@pytest.mark.parametrize("ordering", ["none", "key"])
def test_acks_and_claims_for_many_among_settles_and_rewinds(
    database_url: str, db: psycopg.Connection, ordering: Literal["none", "key"]
) -> None:
    with custody.connect(database_url, pool_size=20) as c:
        verbs = ServerVerbs(c)
        for topic in TOPICS[:2]:
            c.create_topic(topic, partitions=2)
            c.create_group(
                topic,
                "g",
                custody.Policy(
                    ordering=ordering, max_attempts=1000, backoff=custody.Constant("1ms"), dead_letter="topic"
                ),
            )
            c.publish_many(topic, [Outgoing(n, key=str(n % 50)) for n in range(3000)])
        before = deadlocks(db)
        held: list[tuple[object, list[int]]] = []
        guard = threading.Lock()

        def claim(random: random.Random) -> None:
            topic = random.choice(TOPICS[:2])
            leases = verbs.claim_each(topic, "g", None, [Claim(max_messages=random.randint(1, 4)) for _ in range(5)])
            with guard:
                held.extend((lease.lease_id, [message.offset for message in lease]) for lease in leases if lease)

        def taken(random: random.Random, count: int) -> list[tuple[object, list[int]]]:
            with guard:
                random.shuffle(held)
                some, held[:count] = held[:count], []
            return some

        def ack(random: random.Random) -> None:
            callers = [
                Ack(lease_id=lease, offsets=None if random.random() < 0.5 else offsets)
                for lease, offsets in taken(random, 8)
            ]
            for answer in verbs.ack_each(callers) if callers else ():
                assert not isinstance(answer, CustodyError) or isinstance(answer, LeaseLost), answer

        def nack(random: random.Random) -> None:
            for lease, offsets in taken(random, 2):
                with contextlib.suppress(LeaseLost):
                    c.nack(lease, offsets, requeue=random.random() < 0.7)

        def rewind(random: random.Random) -> None:
            if random.random() < 0.2:
                with contextlib.suppress(Busy):  # it gives up when the others leave it no gap for long
                    c.rewind(random.choice(TOPICS[:2]), "g", to_offset=0, partition=random.randrange(2))

        assert storm([claim, ack, nack, rewind], 11) == []
        assert deadlocks(db) == before


@pytest.mark.req("C5", "X15")
def test_an_ack_of_a_lease_of_which_somebody_holds_a_part_is_blocked(make: Make, one: Session, two: Session) -> None:
    """A rewind locks only the rows from which it takes: who has locked the others must not wait for it."""
    make([None] * 600, ordering="none")
    lease = one.claim(600)
    one.ack(lease.lease_id, 300)  # splits the row
    one.commit()
    one.rewind(500)
    two.connection.execute("SET lock_timeout = '2s'")
    answers = two.call(
        "ack_each",
        leases=[lease.lease_id],
        first=[1],
        last=[1],
        offsets=[0],
        topics=[None],
        groups=[None],
        partitions=[None],
        workers=[None],
        wait=False,
    )
    assert [(row[0], row[4]) for row in answers] == [(1, "blocked")]
