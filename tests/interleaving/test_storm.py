"""Every verb at once, at random, on two partitions: no deadlock, no unexpected error, nothing lost, no order broken."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from tests.extent import size
from tests.interleaving.session import GROUP, TOPIC
from tests.order_rule import audit
from tests.property.tables import Reader
from tests.waiting import wait_for

import custody
from custody.errors import Busy, LeaseLost, NotSkippable, OffsetOutOfRange, OrderConflict, QueueFull
from custody.model.lifecycle import MessageState
from custody.model.outcomes import Outcome
from custody.verbs.producer import IdempotentProducer

pytestmark = pytest.mark.core

KEYS = [*(f"k{n}" for n in range(12)), None]
EXPECTED = (LeaseLost, NotSkippable, OffsetOutOfRange, OrderConflict, QueueFull)
"""What a worker or operator may be told when another one was faster."""


@dataclass
class Storm:
    """What the threads share: the leases that anybody may settle, and what has been published."""

    c: custody.Custody
    url: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    leases: list[custody.Lease] = field(default_factory=list)
    published: tuple[dict[int, str | None], dict[int, str | None]] = field(default_factory=lambda: ({}, {}))
    producers: dict[int, IdempotentProducer] = field(default_factory=dict)
    told: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def publish(self, dice: random.Random) -> None:
        messages = [self.message(dice) for _ in range(dice.choice([1, 3, 5, 8, 8, 8, 8, 70]))]
        producer = self.producers[threading.get_ident()]
        publish: Callable[..., list[custody.Receipt]] = dice.choice([self.c.publish_many, producer.publish_many])
        for message, receipt in zip(messages, publish(TOPIC, messages), strict=True):
            with self.lock:
                self.published[receipt.partition][receipt.offset] = message.key

    @staticmethod
    def message(dice: random.Random) -> custody.Outgoing:
        """Says what it is, because it may share a row of the log with others."""
        key, partition, number = dice.choice(KEYS), dice.randrange(2), dice.randrange(1000)
        headers = {"n": str(number)} if number % 3 else None
        return custody.Outgoing(
            [key, partition, number], key=key, partition=partition, headers=headers, allow_split=True
        )

    @staticmethod
    def check(messages: Iterable[custody.Message]) -> None:
        for message in messages:
            key, partition, number = message.payload
            assert (message.key, message.partition) == (key, partition)
            assert message.headers.get("n") == (str(number) if number % 3 else None)

    def read(self, dice: random.Random) -> None:
        """Beside those who drop segments: what is there comes without a gap."""
        partition, count = dice.randrange(2), dice.choice([1, 20, 500])
        tail = len(self.published[partition])
        found = self.c.read(TOPIC, partition, offset=dice.randint(max(0, tail - 300), tail), max_messages=count)
        self.check(found)
        assert [m.offset for m in found] == list(range(found[0].offset, found[-1].offset + 1) if found else ())

    def claim(self, dice: random.Random) -> None:
        lease = self.c.claim(
            TOPIC,
            GROUP,
            max_messages=dice.choice([1, 2, 5, 40]),
            visibility_timeout=dice.choice(["20ms", "200ms", "1s"]),
        )
        if lease:
            self.check(lease)
            with self.lock:
                self.leases = [*self.leases[-100:], lease]

    def settle(self, dice: random.Random) -> None:
        with self.lock:
            if not self.leases:
                return
            # two threads may well settle the same lease at once
            lease = dice.choice(self.leases)
            if dice.random() < 0.7:
                self.leases.remove(lease)
        verb = dice.random()
        if verb < 0.3:
            lease.ack()
        elif verb < 0.4:
            lease.extend("1s", message=dice.choice(lease.messages) if dice.random() < 0.5 else None)
        else:
            kinds = dice.choices(["ack", "nack", "dead", "later", "release"], [6, 3, 1, 1, 1], k=len(lease))
            some = dice.randrange(1, len(lease) + 1)
            self.c.settle(
                lease.lease_id,
                {m.offset: Outcome(kind, delay=0.01) for m, kind in list(zip(lease, kinds, strict=True))[:some]},  # type: ignore[arg-type]
            )

    def repair(self, dice: random.Random) -> None:
        verb = dice.random()
        partition = dice.randrange(2)
        if verb < 0.3:
            self.c.redrive(TOPIC, GROUP, limit=dice.choice([None, 3]))
        elif verb < 0.4:
            tail = len(self.published[partition])
            self.c.rewind(TOPIC, GROUP, to_offset=dice.randrange(max(0, tail - 30), tail + 1), partition=partition)
        elif verb < 0.5:
            self.c.rewind(TOPIC, GROUP, to_time=datetime.now(UTC) - timedelta(milliseconds=dice.randrange(200)))
        elif verb < 0.8:
            blocked = self.c.blocked_keys(TOPIC, GROUP)
            if blocked:
                key = dice.choice(blocked)
                if dice.random() < 0.5 or key.blocked_by is None:
                    self.c.release_key(TOPIC, GROUP, key.key)
                else:
                    self.c.skip(TOPIC, GROUP, key.partition, key.blocked_by)
        else:
            with psycopg.connect(self.url, autocommit=True) as connection:
                connection.execute("SELECT custody.seal_segment(%s)", (TOPIC,))
                connection.execute("SELECT * FROM custody.drop_segments(%s)", (TOPIC,))

    def run(self, seed: int, rounds: int) -> None:
        dice = random.Random(seed)
        self.producers[threading.get_ident()] = self.c.init_producer(f"thread {seed}")
        verbs: list[Callable[[random.Random], None]] = [self.publish, self.claim, self.settle, self.repair, self.read]
        for _ in range(rounds):
            verb = dice.choices(verbs, [2, 8, 9, 2, 1])[0]
            try:
                verb(dice)
            except EXPECTED as told:
                self.told[told.code] += 1
            except (custody.CustodyError, psycopg.Error) as error:
                cause = error.__cause__ or error
                waited = isinstance(error, Busy | psycopg.errors.LockNotAvailable)  # it gave up waiting, as it should
                if waited and not isinstance(cause, psycopg.errors.DeadlockDetected):
                    self.told["busy"] += 1
                else:
                    self.errors.append(f"{verb.__name__}: {type(cause).__name__}: {cause}")


def drain(c: custody.Custody) -> None:
    def step() -> bool:
        while lease := c.claim(TOPIC, GROUP, max_messages=500):
            lease.ack()
        for blocked in c.blocked_keys(TOPIC, GROUP):
            if blocked.why == "held":
                c.release_key(TOPIC, GROUP, blocked.key)
        return c.stats(TOPIC, GROUP).depth == 0

    wait_for(step, lambda: f"the group does not come to an end: {c.stats(TOPIC, GROUP)}", timeout=60)


@pytest.mark.req("K2", "N2", "C3")
@pytest.mark.parametrize("on_dead", ["release", "hold"])
@pytest.mark.parametrize("rounds", [size(40, 200), pytest.param(1500, marks=pytest.mark.long)], ids=["some", "many"])
def test_random_verbs_side_by_side(database_url: str, db: psycopg.Connection, on_dead: str, rounds: int) -> None:
    with custody.connect(database_url, pool_size=12) as c:
        c.create_topic(TOPIC, partitions=2)
        c.create_group(
            TOPIC,
            GROUP,
            custody.Policy(ordering="key", on_dead=on_dead, max_attempts=4, backoff=custody.Constant("5ms")),  # type: ignore[arg-type]
        )
        storm = Storm(c, database_url)
        with ThreadPoolExecutor(8) as threads:
            for thread in [threads.submit(storm.run, seed, rounds) for seed in range(8)]:
                thread.result(280)
        assert storm.errors == []
        drain(c)
        for partition in (0, 1):
            tail = c.topic(TOPIC).tails[partition]
            keys = storm.published[partition]
            assert sorted(keys) == list(range(tail))
            verdict = audit(db, TOPIC, GROUP, partition, hold=on_dead == "hold", keys=keys)
            assert verdict.violations == []
            # done or dead, each of them, and the journal says the same as the tables
            assert set(verdict.states) == set(range(tail))
            assert set(verdict.states.values()) <= {MessageState.DONE, MessageState.DEAD}
            dead = {letter.offset for letter in c.dead(TOPIC, GROUP) if letter.partition == partition}
            assert {offset for offset, state in verdict.states.items() if state is MessageState.DEAD} == dead
            assert Reader(db, TOPIC, GROUP, partition).read(datetime.now(UTC)).lost_wake_ups() == []
