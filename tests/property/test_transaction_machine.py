"""Random transactions, delayed messages and plain publishes, with crashes between any two steps.

Whatever is cut off where, a transaction is visible whole or not at all, its acks with it, and offsets stay dense.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.property.test_log_machine import EXAMPLES, STEPS

import custody
from custody.errors import LeaseLost, ProducerFenced, TransactionOver

if TYPE_CHECKING:
    from tests.conftest import Clock

_names = itertools.count()
TIMEOUT = 30
Entry = tuple[str, Any]
KEYS = st.sampled_from(("a", "b", "c", "d"))  # all of them: a place by chance could not be played again
WHICH = st.integers(0, 7)
additions = st.lists(
    st.tuples(st.integers(0, 1), KEYS, st.sampled_from((None, None, 2, 20))),
    min_size=1,
    max_size=6,
)


@dataclass
class Open:
    """A transaction as its producer knows it."""

    epoch: int
    expires_at: datetime
    messages: list[tuple[str, Entry, int | None]] = field(default_factory=list)
    acks: dict[UUID, set[int]] = field(default_factory=dict)


class Machine(RuleBasedStateMachine):
    def __init__(self, c: custody.Custody, clock: Clock) -> None:
        super().__init__()
        self.c, self.clock = c, clock
        self.name = f"tx-{next(_names)}"
        self.topics = [f"{self.name}-{n}" for n in range(2)]
        self.log: dict[tuple[str, int], list[Entry]] = {(topic, p): [] for topic in self.topics for p in range(2)}
        self.waiting: dict[int, tuple[str, int, datetime, Entry]] = {}
        self.open: dict[UUID, Open] = {}
        self.leases: dict[UUID, tuple[int, set[int], datetime]] = {}
        self.done: set[tuple[int, int]] = set()
        self.numbers = itertools.count()
        self.epoch = 0

    @initialize()
    def create(self) -> None:
        for topic in self.topics:
            self.c.create_topic(topic, partitions=2)
        self.c.create_group(self.topics[0], "g", custody.Policy(visibility_timeout="20s", max_attempts=1000))
        self.take_over()

    def teardown(self) -> None:
        for topic in self.topics:
            self.c.delete_topic(topic)

    @rule()
    def take_over(self) -> None:
        self.epoch = self.c.init_producer(self.name).epoch

    @rule(seconds=st.sampled_from((1, 5, 40)))
    def move_clock(self, seconds: int) -> None:
        self.clock.move(seconds)

    def _deliver(self, topic: str, partition: int) -> None:
        """What is due goes to the log before anything else is appended or claimed there."""
        due = sorted(
            (at, delay_id)
            for delay_id, (where, p, at, _) in self.waiting.items()
            if (where, p) == (topic, partition) and at <= self.clock()
        )
        for _, delay_id in due:
            self.log[topic, partition].append(self.waiting.pop(delay_id)[3])

    @rule(topic=st.integers(0, 1), key=KEYS, delay=st.sampled_from((None, 3)))
    def publish(self, topic: int, key: str, delay: int | None) -> None:
        name, entry = self.topics[topic], (key, next(self.numbers))
        if delay is not None:
            later = self.c.publish(name, entry[1], key=key, delay=delay)
            self.waiting[later.delay_id] = (name, later.partition, later.deliver_at, entry)
            return
        receipt = self.c.publish(name, entry[1], key=key)
        self._deliver(name, receipt.partition)
        assert receipt.offset == len(self.log[name, receipt.partition])
        self.log[name, receipt.partition].append(entry)

    @precondition(lambda self: self.waiting)
    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        delay_id = sorted(self.waiting)[which % len(self.waiting)]
        self.c.cancel_delayed(self.waiting.pop(delay_id)[0], delay_id)

    @rule(most=st.integers(1, 5), partition=st.integers(0, 1))
    def claim(self, most: int, partition: int) -> None:
        lease = self.c.claim(self.topics[0], "g", max_messages=most, partition=partition)
        self._deliver(self.topics[0], partition)
        for message in lease:
            assert self.log[self.topics[0], partition][message.offset] == (message.key, message.payload)
            assert (partition, message.offset) not in self.done
        if lease:
            self.leases[lease.lease_id] = (partition, {message.offset for message in lease}, lease.deadline)

    @rule()
    def begin(self) -> None:
        transaction_id, expires_at = self.c.transactions.begin(self.name, epoch=self.epoch, timeout=TIMEOUT)
        self.open[transaction_id] = Open(self.epoch, expires_at)

    def _any(self, which: int) -> tuple[UUID, Open]:
        return list(self.open.items())[which % len(self.open)]

    def _alive(self, tx: Open) -> type[Exception] | None:
        if self.clock() >= tx.expires_at:
            return TransactionOver
        return ProducerFenced if tx.epoch != self.epoch else None

    @precondition(lambda self: self.open)
    @rule(which=WHICH, batch=additions, repeat=st.booleans())
    def add(self, which: int, batch: list[tuple[int, str, int | None]], repeat: bool) -> None:
        transaction_id, tx = self._any(which)
        for topic, key, delay in batch:
            entry, name = (key, next(self.numbers)), self.topics[topic]
            message = custody.Outgoing(entry[1], key=key, delay=delay)
            refused = self._alive(tx)
            if refused:
                with pytest.raises(refused):
                    self.c.transactions.add(transaction_id, name, [message])
                return
            for _ in range(1 + repeat):  # an answer that was lost: the same again
                self.c.transactions.add(transaction_id, name, [message], first=len(tx.messages))
            tx.messages.append((name, entry, delay))

    @precondition(lambda self: self.open and self.leases)
    @rule(which=WHICH, share=st.integers(1, 5))
    def ack(self, which: int, share: int) -> None:
        transaction_id, tx = self._any(which)
        lease_id = list(self.leases)[share % len(self.leases)]
        offsets = sorted(self.leases[lease_id][1])[:share]
        if self._alive(tx) is None and offsets:
            self.c.transactions.ack(transaction_id, lease_id, offsets)
            tx.acks.setdefault(lease_id, set()).update(offsets)

    def _lost(self, tx: Open) -> bool:
        return any(
            not offsets <= self.leases[lease_id][1] or self.clock() >= self.leases[lease_id][2]
            for lease_id, offsets in tx.acks.items()
        )

    @precondition(lambda self: self.open)
    @rule(which=WHICH, crash=st.booleans())
    def commit(self, which: int, crash: bool) -> None:
        transaction_id, tx = self._any(which)
        if crash:  # everything was done but the database's own commit
            call = "SELECT custody.commit_transaction(%s, p_now => %s)"
            with psycopg.connect(self.c.database_url) as connection:
                with suppress(psycopg.DatabaseError):  # refused here as below
                    connection.execute(call, [transaction_id, self.clock()])
                connection.rollback()
        refused = self._alive(tx) or (LeaseLost if self._lost(tx) else None)
        if refused:
            with pytest.raises(refused):
                self.c.transactions.commit(transaction_id)
            return
        receipts = self.c.transactions.commit(transaction_id)
        for receipt in receipts:
            if isinstance(receipt, custody.Receipt):
                self._deliver(receipt.topic, receipt.partition)
        for (name, entry, _), receipt in zip(tx.messages, receipts, strict=True):
            assert receipt.topic == name
            if isinstance(receipt, custody.Delayed):
                self.waiting[receipt.delay_id] = (name, receipt.partition, receipt.deliver_at, entry)
            else:
                assert receipt.offset == len(self.log[name, receipt.partition])
                self.log[name, receipt.partition].append(entry)
        for lease_id, offsets in tx.acks.items():
            partition, held, deadline = self.leases[lease_id]
            self.leases[lease_id] = (partition, held - offsets, deadline)
            self.done |= {(partition, offset) for offset in offsets}
        assert self.c.transactions.commit(transaction_id) == receipts
        del self.open[transaction_id]

    @precondition(lambda self: self.open)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        transaction_id, _ = self._any(which)
        self.c.transactions.abort(transaction_id)
        del self.open[transaction_id]

    @precondition(lambda self: self.open)
    @rule(which=WHICH)
    def abandon(self, which: int) -> None:
        """Its producer has crashed: nobody will ever end it."""
        transaction_id, _ = self._any(which)
        del self.open[transaction_id]

    @invariant()
    def dense_and_whole(self) -> None:
        for (topic, partition), expected in self.log.items():
            messages = self.c.read(topic, partition, max_messages=len(expected) + 10)
            assert [message.offset for message in messages] == list(range(len(expected)))
            assert [(message.key, message.payload) for message in messages] == expected

    @invariant()
    def waiting_are_listed(self) -> None:
        for topic in self.topics:
            listed = {
                (w.delay_id, w.partition, w.deliver_at, w.key, w.payload) for w in self.c.delayed(topic, limit=1000)
            }
            assert listed == {(i, p, at, *entry) for i, (t, p, at, entry) in self.waiting.items() if t == topic}


@pytest.mark.core
@pytest.mark.req("G12", "G15")
def test_random_transactions(c: custody.Custody, clock: Clock) -> None:
    run_state_machine_as_test(
        lambda: Machine(c, clock),  # type: ignore[arg-type]  # whatever makes one will do
        settings=settings(
            max_examples=max(1, EXAMPLES // 2),
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
