"""Random events of an outbox, for a topic and for a relay, against a model: transactions that commit or not, claims
and publishes that move events into the log, relays that settle, extend, expire and crash, operators that give up,
replay and prune.

Whatever happens in which order: nothing is lost, only legal moves are made, no key is overtaken, and what is committed
for a topic is in its log once for each of its lives.
"""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta
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
from tests.property.outbox_model import OPEN, UNORDERED, Model, Modelled
from tests.property.test_log_machine import EXAMPLES, STEPS

import custody
from custody.outbox import EventState, Outbox
from custody.store.postgres import run_function

if TYPE_CHECKING:
    from tests.conftest import Clock

_names = itertools.count()
LEASE = timedelta(seconds=20)
MAX_ATTEMPTS = 3
MAX_AGE = timedelta(seconds=40)
BACKOFF = 5
KEYS = st.sampled_from((None, "a", "a", "b"))
WHICH = st.integers(0, 7)
OUTCOMES = st.sampled_from(("published", "published", "failed", "unavailable", "dead", "released"))


class Machine(RuleBasedStateMachine):
    def __init__(self, c: custody.Custody, outbox: Outbox, connection: psycopg.Connection[Any], clock: Clock) -> None:
        super().__init__()
        self.c, self.outbox, self.connection, self.clock = c, outbox, connection, clock
        self.topic = f"outbox-{next(_names)}"
        self.read = {0: 0, 1: 0}
        self.claims: dict[str, list[UUID]] = {}
        self.numbers = itertools.count()

    @initialize(
        hold=st.booleans(),
        max_age=st.sampled_from((None, MAX_AGE)),
        retry_for=st.sampled_from((timedelta(0), timedelta(seconds=15))),
    )
    def create(self, hold: bool, max_age: timedelta | None, retry_for: timedelta) -> None:
        self.model = Model(self.clock, hold=hold, max_age=max_age, retry_for=retry_for, max_attempts=MAX_ATTEMPTS)
        self.c.create_topic(self.topic, partitions=2)
        self.c.create_group(self.topic, "g")
        self.topic_id, self.after = self.connection.execute(
            "SELECT topic_id, coalesce((SELECT max(id) FROM custody.outbox), 0) FROM custody.topics WHERE name = %s",
            [self.topic],
        ).fetchall()[0]

    def teardown(self) -> None:
        if self.model.events:
            self.outbox.kill(list(self.model.events))
        self.c.delete_topic(self.topic)

    def call(self, function: str, *, crash: bool = False, **arguments: Any) -> list[tuple[Any, ...]]:
        """One verb; with `crash` everything was done but the commit."""
        with self.connection.transaction(force_rollback=crash):
            return run_function(self.connection, function, {**arguments, "now": self.clock()})

    @rule(seconds=st.sampled_from((1, 4, 25)))
    def move_clock(self, seconds: int) -> None:
        self.clock.move(seconds)

    @rule(
        batch=st.lists(st.tuples(st.booleans(), KEYS, st.sampled_from((0, 3))), min_size=1, max_size=5),
        commit=st.sampled_from((True, True, True, False)),
    )
    def write(self, batch: list[tuple[bool, str | None, int]], commit: bool) -> None:
        """In a transaction of an application, which commits or does not."""
        written: dict[UUID, tuple[int, str | None, datetime]] = {}
        with self.connection.transaction(force_rollback=not commit):
            for to_topic, key, delay in batch:
                n, at = next(self.numbers), self.clock() + timedelta(seconds=delay)
                destination = self.topic if to_topic else f"{self.topic}:"
                event_id = custody.outbox.write(
                    self.connection,
                    event_type="e",
                    payload=n,
                    destination=destination,
                    ordering_key=key,
                    partition_key=UNORDERED,
                    available_at=at,
                )
                written[event_id] = (n, key, at)
        for event_id, (n, key, at) in written.items():
            rows = self.connection.execute(
                "SELECT id, partition FROM custody.outbox WHERE event_id = %s", [event_id]
            ).fetchall()
            assert len(rows) == commit
            for number, partition in rows:
                self.model.events[event_id] = Modelled(
                    id=number, n=n, key=key, partition=partition, available_at=at, ages_from=at
                )

    @rule(key=st.sampled_from(("a", "b", "c")))
    def publish(self, key: str) -> None:
        n = next(self.numbers)
        receipt = self.c.publish(self.topic, n, key=key)
        self.model.move(receipt.partition)
        assert receipt.offset == len(self.model.log[receipt.partition])
        self.model.log[receipt.partition].append((key, n))

    @rule(partition=st.integers(0, 1), most=st.integers(1, 5))
    def consume(self, partition: int, most: int) -> None:
        lease = self.c.claim(self.topic, "g", partition=partition, max_messages=most)
        self.model.move(partition)
        expected = self.model.log[partition][self.read[partition] :][:most]
        assert [(message.key, message.payload) for message in lease] == expected
        if lease:
            lease.ack()
        self.read[partition] += len(lease)

    @rule(partition=st.integers(0, 1), crash=st.booleans())
    def move_by_relay(self, partition: int, crash: bool) -> None:
        ((moved,),) = self.call("move_outbox", crash=crash, topic_id=self.topic_id, partition=partition)
        if not crash:
            assert moved == self.model.move(partition)

    @precondition(lambda self: self.model.events)
    @rule(most=st.integers(1, 40), crash=st.sampled_from((False, False, False, True)), alone=st.booleans())
    def claim(self, most: int, crash: bool, alone: bool) -> None:
        """By a relay. What has expired is found on the way, and counts as an attempt."""
        rows = self.call(
            "outbox_claim",
            crash=crash,
            relay="r",
            max=most,
            lease=LEASE,
            max_attempts=MAX_ATTEMPTS,
            max_age=self.model.max_age,
            hold=self.model.hold,
            only=[f"{self.topic}:"],
            after=self.after,
            alone=alone,
        )[1:]
        if crash:
            return
        claimable = [
            i for i, event in self.model.events.items() if self.model.expired(event) or self.model.ready(event)
        ][:most]
        wanted = [
            i for i in claimable if self.model.ready(self.model.events[i]) and not self.model.dies(self.model.events[i])
        ]
        wanted = self.model.apart(wanted, alone)
        for event in map(self.model.events.__getitem__, claimable):
            if event.status is EventState.CLAIMED:
                self.model.expire(event)
        for event in map(self.model.events.__getitem__, wanted):
            if event.status is EventState.PENDING and self.model.too_old(event):
                event.status = EventState.CLAIMED  # there is no other way
                event.become(EventState.DEAD, self.clock())
        wanted = [event_id for event_id in wanted if self.model.events[event_id].status is EventState.PENDING]
        expected = [event_id for event_id in wanted if self.model.nothing_before(event_id, wanted)]
        assert sorted(row[1] for row in rows) == sorted(expected)
        for row in rows:
            event = self.model.events[row[1]]
            assert (row[0], row[10], row[11]) == (event.id, event.attempts, event.replays)
            event.status, event.claim, event.expires_at = EventState.CLAIMED, row[12], self.clock() + LEASE
            event.claimed_with = len(rows)
        if rows:
            self.claims[rows[0][12]] = expected

    @precondition(lambda self: self.claims)
    @rule(
        which=WHICH,
        outcomes=st.lists(OUTCOMES, min_size=1, max_size=6),
        after=st.sampled_from((0, 0, 1, 25)),
        crash=st.sampled_from((False, False, True)),
    )
    def settle(self, which: int, outcomes: list[str], after: int, crash: bool) -> None:
        """Of a claim that may have expired long ago: only what it still holds changes."""
        self.clock.move(after)
        claim = list(self.claims)[-1 - which % len(self.claims)]
        told: list[tuple[UUID, str]] = []
        stopped: set[str | None] = set()
        for event_id, outcome in zip(self.claims[claim], itertools.cycle(outcomes), strict=False):
            if event_id in self.model.events:  # a relay gives back what follows in a key that does not go on
                key = self.model.events[event_id].key
                told.append((event_id, "released" if key in stopped else outcome))
                if key is not None and outcome in ("failed", "unavailable", "released"):
                    stopped.add(key)
        settled = self.call(
            "outbox_settle",
            crash=crash,
            claim=claim,
            ids=[self.model.events[event_id].id for event_id, _ in told],
            outcomes=[outcome for _, outcome in told],
            errors=[outcome for _, outcome in told],
            delays=[float(BACKOFF)] * len(told),
            max_attempts=MAX_ATTEMPTS,
            max_age=self.model.max_age,
            retry_for=self.model.retry_for,
        )
        if crash:
            return
        expected = {}
        for event_id, outcome in told:
            if self.model.holds(claim, event_id):
                event = self.model.events[event_id]
                event.attempts += outcome in ("failed", "unavailable", "dead")
                event.failures += outcome in ("failed", "dead")
                if outcome == "published":
                    event.become(EventState.PUBLISHED, self.clock())
                elif outcome == "dead" or (
                    outcome == "failed"
                    and ((event.failures >= MAX_ATTEMPTS and self.model.retried(event)) or self.model.too_old(event))
                ):
                    event.become(EventState.DEAD, self.clock())
                else:
                    event.become(EventState.PENDING, self.clock())
                if outcome != "released":
                    event.suspect = None
                if outcome == "failed":
                    event.available_at = self.clock() + timedelta(seconds=BACKOFF)
                expected[event.id] = event.status.value
        assert dict(settled) == expected

    @precondition(lambda self: self.model.events)
    @rule(
        most=st.integers(1, 6),
        outcomes=st.lists(OUTCOMES, min_size=1, max_size=6),
        after=st.sampled_from((0, 0, 1, 25)),
    )
    def relay_round(self, most: int, outcomes: list[str], after: int) -> None:
        """A whole round of a relay, which may be too slow: by chance alone claim and settle would seldom meet."""
        before = len(self.claims)
        self.claim(most=most, crash=False, alone=True)
        if len(self.claims) > before:
            self.settle(which=0, outcomes=outcomes, after=after, crash=False)

    @precondition(lambda self: self.claims)
    @rule(which=WHICH)
    def extend(self, which: int) -> None:
        claim = list(self.claims)[-1 - which % len(self.claims)]
        held = [event_id for event_id in self.claims[claim] if self.model.holds(claim, event_id)]
        ids = [self.model.events[event_id].id for event_id in self.claims[claim] if event_id in self.model.events]
        kept = {row[0] for row in self.call("outbox_extend", claim=claim, ids=ids, lease=LEASE)}
        assert kept == {self.model.events[event_id].id for event_id in held}
        for event_id in held:
            self.model.events[event_id].expires_at = self.clock() + LEASE

    @precondition(lambda self: self.model.events)
    @rule(which=WHICH)
    def give_up(self, which: int) -> None:
        event_id = list(self.model.events)[which % len(self.model.events)]
        event = self.model.events[event_id]
        assert self.outbox.kill([event_id]) == ([event_id] if event.status in OPEN else [])
        if event.status in OPEN:
            event.status = EventState.CLAIMED  # there is no other way
            event.become(EventState.DEAD, self.clock())
            event.available_at = min(event.available_at, self.clock())  # for it is claimed on its way

    @precondition(lambda self: self.model.events)
    @rule(state=st.sampled_from((EventState.DEAD, EventState.PUBLISHED)), most=st.integers(1, 3))
    def replay(self, state: EventState, most: int) -> None:
        chosen = [event_id for event_id, event in self.model.events.items() if event.status is state][-most:]
        assert self.outbox.replay(states=[state], ids=chosen) == chosen
        for event in map(self.model.events.__getitem__, chosen):
            event.become(EventState.PENDING, self.clock())
            event.attempts, event.available_at, event.ages_from = 0, self.clock(), self.clock()
            event.replays += state is EventState.PUBLISHED
            event.failures, event.crashes, event.suspect = 0, 0, None

    @rule(age=st.sampled_from((3, 30)), dead=st.booleans())
    def prune(self, age: int, dead: bool) -> None:
        states = [EventState.PUBLISHED, EventState.DEAD] if dead else [EventState.PUBLISHED]
        self.outbox.prune(age, states=states)
        before = self.clock() - timedelta(seconds=age)
        ended = ((i, e.ended_at) for i, e in self.model.events.items() if e.status in states)
        gone = [event_id for event_id, at in ended if at is not None and at < before]
        for event_id in gone:
            del self.model.events[event_id]

    @invariant()
    def the_table_says_the_same(self) -> None:
        rows = self.connection.execute(
            "SELECT event_id, status, attempts, claimed_by, expires_at, available_at, replays, claimed_with, suspect, "
            "crashes, failures FROM custody.outbox WHERE destination = ANY (%s)",
            [[self.topic, f"{self.topic}:"]],
        ).fetchall()
        assert {row[0]: row[1:] for row in rows} == {
            event_id: (
                e.status.value,
                e.attempts,
                e.claim,
                e.expires_at,
                e.available_at,
                e.replays,
                e.claimed_with,
                e.suspect,
                e.crashes,
                e.failures,
            )
            for event_id, e in self.model.events.items()
        }

    @invariant()
    def one_relay_has_a_key(self) -> None:
        """What is held of a key is the beginning of what is open, under one claim; a replay brings back others."""
        rows = self.connection.execute(
            "SELECT ordering_key, array_agg(CASE WHEN expires_at > %s THEN claimed_by END ORDER BY id) "
            "FROM custody.outbox "
            "WHERE destination = %s AND ordering_key IS NOT NULL AND status IN ('PENDING', 'CLAIMED') "
            "GROUP BY 1 HAVING bool_and(replayed_at IS NULL)",
            [self.clock(), f"{self.topic}:"],
        ).fetchall()
        for key, claims in rows:
            held = [claim for claim in claims if claim is not None]
            assert claims[: len(held)] == held, f"{key}: {claims}"
            assert len(set(held)) <= 1, f"{key}: {claims}"

    @invariant()
    def each_life_is_in_the_log_once(self) -> None:
        for partition, expected in self.model.log.items():
            messages = self.c.read(self.topic, partition, max_messages=len(expected) + 10)
            assert [(message.key, message.payload) for message in messages] == expected


@pytest.mark.core
@pytest.mark.req("V10", "O3", "O5", "O7", "O8", "O10", "O11")
def test_random_events(c: custody.Custody, clock: Clock) -> None:
    with (
        Outbox(c.database_url, clock=clock, actor="test") as outbox,
        psycopg.connect(c.database_url, autocommit=True) as connection,
    ):
        run_state_machine_as_test(
            lambda: Machine(c, outbox, connection, clock),  # type: ignore[arg-type]  # whatever makes one will do
            settings=settings(
                max_examples=max(1, EXAMPLES // 2),
                stateful_step_count=STEPS,
                deadline=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
