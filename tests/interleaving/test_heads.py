"""Heads of two topics in one transaction. Publishers take them sorted; whoever waits for others must hold none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count

import psycopg
import pytest
from psycopg.errors import DeadlockDetected
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session
from tests.waiting import wait_for

import custody
import custody.outbox
from custody.model.placement import partition_for

pytestmark = [pytest.mark.core, pytest.mark.req("G10", "X5")]

DLQ = f"{TOPIC}-dlq"
COPIED = {"dead_letter": "topic", "max_attempts": 1, "ordering": "none"}
HEAD = (
    "SELECT 1 FROM custody.heads h JOIN custody.topics USING (topic_id)"
    " WHERE name = %s AND partition = %s FOR UPDATE OF h"
)


@pytest.fixture
def older_dlq(c: custody.Custody, make: Make) -> None:
    """The dead-letter topic is older than its topic: who publishes to both takes its head first."""
    c.create_topic(DLQ, partitions=2)
    make(partitions=2, **COPIED)


def free(c: custody.Custody, topic: str, partition: int) -> bool:
    with psycopg.connect(c.database_url) as other:
        try:
            other.execute(HEAD + " NOWAIT", [topic, partition])
        except psycopg.errors.LockNotAvailable:
            return False
    return True


@pytest.mark.usefixtures("older_dlq")
@pytest.mark.parametrize("arrives", ["delayed", "outbox"])
def test_a_claim_that_waits_to_copy_a_death_has_delivered_nothing(
    c: custody.Custody, one: Session, two: Session, clock: Clock, arrives: str
) -> None:
    c.publish(TOPIC, 0, partition=0)
    c.claim(TOPIC, GROUP)
    if arrives == "delayed":
        c.publish(TOPIC, 1, partition=0, delay=1)
    clock.move(31)
    if arrives == "outbox":
        with psycopg.connect(c.database_url) as own:
            key = next(str(n) for n in count() if partition_for(str(n), 2) == 0)
            custody.outbox.write(own, event_type="placed", payload=1, destination=TOPIC, ordering_key=key)
    two.connection.execute(HEAD, [DLQ, 0])
    claiming = one.blocked(one.claim, partition=0)
    assert free(c, TOPIC, 0), "it waits for one head, and holds another"
    two.publish([None])  # a publisher to both: a deadlock, if the claim had the second one
    two.commit()
    assert claiming.result(10).reason == "busy", "there is more to come: claim again"
    one.commit()
    assert [dead.offset for dead in c.dead(TOPIC, GROUP)] == [0]
    assert c.topic(DLQ).message_count == 1
    assert sorted(message.payload for message in c.read(TOPIC)) == [0, 1, 1], "the next one has delivered it"


@pytest.mark.usefixtures("older_dlq")
def test_after_a_delivery_the_same_claim_leaves_what_could_die_to_the_next(
    c: custody.Custody, one: Session, two: Session, clock: Clock, db: psycopg.Connection
) -> None:
    """Partition 1 gets a delayed message that a cap keeps from being handed out; then partition 0 is looked at."""
    c.update_group(TOPIC, GROUP, custody.Policy(max_in_flight=1, **COPIED))  # type: ignore[arg-type]
    c.publish_many(TOPIC, [custody.Outgoing(n, partition=n) for n in (0, 1)])
    c.claim(TOPIC, GROUP, partition=0, visibility_timeout=30)
    c.claim(TOPIC, GROUP, partition=1, visibility_timeout=300)
    c.publish(TOPIC, 2, partition=1, delay=1)
    clock.move(31)
    seed_for_order(one, db, clock, [1, 0])
    two.connection.execute(HEAD, [DLQ, 0])
    assert one.start(one.claim).result(10).reason == "max_in_flight", "it holds a head, and does not wait"
    assert not free(c, TOPIC, 1)
    one.commit()
    two.rollback()
    assert c.dead(TOPIC, GROUP) == []
    assert not c.claim(TOPIC, GROUP, partition=0)
    assert [dead.offset for dead in c.dead(TOPIC, GROUP)] == [0]


@pytest.mark.usefixtures("older_dlq")
def test_claims_for_several_callers_wait_for_copies_once(
    c: custody.Custody, one: Session, two: Session, clock: Clock, db: psycopg.Connection
) -> None:
    c.publish_many(TOPIC, [custody.Outgoing(n, partition=n % 2) for n in range(4)])
    for partition in (0, 1):
        c.claim(TOPIC, GROUP, partition=partition)
    clock.move(31)
    seed_for_order(one, db, clock, [1, 0])
    two.connection.execute(HEAD, [DLQ, 0])
    rows = one.start(
        one.call,
        "claim_each",
        topic=TOPIC,
        group=GROUP,
        partition=None,
        max=[1, 1],
        visibility=[None, None],
        workers=["a", "b"],
        now=clock(),
    ).result(10)
    assert [(row[0], row[1]["partition"]) for row in rows if row[1] is not None] == [(1, 1), (2, 0)]
    assert not free(c, DLQ, 1), "the first claim has copied its death, and the second leaves its own to a later one"
    one.commit()
    two.rollback()
    assert [(dead.partition, dead.offset) for dead in c.dead(TOPIC, GROUP)] == [(1, 0)]
    c.claim(TOPIC, GROUP, partition=0)
    assert sorted((dead.partition, dead.offset) for dead in c.dead(TOPIC, GROUP)) == [(0, 0), (1, 0)]


@pytest.mark.req("X2")
@pytest.mark.parametrize("driven", [False, True])
def test_a_claim_that_waited_to_copy_a_death_hands_out_a_whole_lease(
    c: custody.Custody, one: Session, two: Session, database_url: str, driven: bool
) -> None:
    c.create_topic("x-dlq")
    with custody.connect(database_url) as real:  # the clock of the database
        real.create_topic("x")
        real.create_group("x", GROUP, custody.Policy(max_attempts=1, dead_letter="topic"))
        real.publish_many("x", [1, 2])
        short = real.claim("x", GROUP, visibility_timeout="1ms")
        drive, _ = real.drive("x", GROUP)
        two.connection.execute(HEAD, ["x-dlq", 0])
        wait_for(lambda: datetime.now(UTC) > short.deadline, "the first lease has not expired")
        if driven:
            named = {"topic": "x", "group": GROUP, "epoch": drive.driver.epoch, "max": 1}
            claiming = one.blocked(one.call, "claim_batch", **named, visibility=timedelta(seconds=9))
        else:
            claiming = one.blocked(one.call, "claim", topic="x", group=GROUP, visibility=timedelta(seconds=9))
        unlocked = two.connection.execute("SELECT clock_timestamp()").fetchall()[0][0]
        two.rollback()
        claiming.result(10)
        one.commit()
        deadline = one.connection.execute("SELECT deadline FROM custody.leases").fetchall()[0][0]
        assert deadline >= unlocked + timedelta(seconds=9)
        assert [dead.offset for dead in real.dead("x", GROUP)] == [0]


def seed_for_order(session: Session, db: psycopg.Connection, clock: Clock, order: list[int]) -> None:
    """Lets the next claim of the session try its partitions in this order."""
    candidates = (
        "SELECT custody.claim_candidates(g, %s) FROM custody.groups g WHERE g.name = %s",
        [clock(), GROUP],
    )
    for seed in range(100):
        db.execute("SELECT setseed(%s)", [seed / 100])
        if db.execute(*candidates).fetchone() == (order,):
            session.connection.execute("SELECT setseed(%s)", [seed / 100])
            return
    raise AssertionError(f"no seed gives the order {order}")


@pytest.mark.usefixtures("older_dlq")
@pytest.mark.parametrize("rounds", [60, pytest.param(1500, marks=pytest.mark.long)])
def test_a_storm_of_deaths_deliveries_and_publishes_to_both_topics(database_url: str, rounds: int) -> None:
    """Each claim finds an expired lease to bury, and a delayed message to deliver."""

    one = "ARRAY[NULL::text], ARRAY['j'], ARRAY['1'::bytea], ARRAY[NULL::text]"

    def run(statements: list[str], times: int) -> int:
        """How many of these transactions ended in a deadlock."""
        deadlocks = 0
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("SET deadlock_timeout = '20ms'")  # a deadlock shows at once
            for _ in range(times):
                try:
                    with connection.transaction():
                        for statement in statements:
                            connection.execute(statement)
                except DeadlockDetected:
                    deadlocks += 1
        return deadlocks

    publish = [
        f"SELECT custody.publish('{DLQ}', ARRAY[0], {one})",
        f"SELECT custody.publish_delayed('{TOPIC}', ARRAY[0], {one}, ARRAY[NULL::timestamptz], ARRAY[0.001])",
        f"SELECT custody.publish('{TOPIC}', ARRAY[0], {one})",
    ]
    claim = [f"SELECT * FROM custody.claim('{TOPIC}', '{GROUP}', 1, '1 ms')"]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(run, verb, rounds) for verb in (publish, claim, publish, claim)]
        assert sum(each.result() for each in running) == 0, "deadlocks"
