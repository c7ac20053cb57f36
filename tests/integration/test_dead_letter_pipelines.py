"""A pipeline's commit publishes its outputs and the copies of what died in one transaction."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import everything
from tests.integration.test_pipelines import assert_in_key_order, publish, published, run
from tests.waiting import wait_for

import custody
from custody.errors import StageLost
from custody.model.outcomes import Outcome
from custody.spark.database.tasks import TaskClaim

pytestmark = [pytest.mark.core, pytest.mark.req("G10", "S4")]

POLICY = custody.Policy(ordering="key", max_attempts=3, backoff=custody.Constant("10s"), dead_letter="topic")
DEAD = Outcome("dead", error="hopeless")


def make(c: custody.Custody, first: str = "in") -> None:
    """The topics, in either order: heads are taken by the topic's number."""
    if first == "out":
        c.create_topic("out", partitions=2)
    c.create_topic("in", partitions=2)
    c.create_group("in", "g", POLICY)
    if first == "in":
        c.create_topic("out", partitions=2)


def copies(c: custody.Custody) -> list[tuple[int, str]]:
    found = [message for partition in range(2) for message in c.read("in-dlq", partition, max_messages=10_000)]
    return sorted((message.payload["n"], message.headers["x-custody-dlq-reason"]) for message in found)


@pytest.mark.parametrize("first", ["in", "out"])
def test_outputs_and_copies_are_committed_together_and_once(c: custody.Custody, first: str) -> None:
    make(c, first)
    publish(c, 100)
    drive, _ = c.drive("in", "g")
    number = drive.claim(1000).number
    assert number == 1
    dying = {7: DEAD, 8: Outcome("reject", error="no"), 50: DEAD}
    work = run(c, drive, number, dying)
    result = drive.commit(number, work)
    assert (result.done, result.dead, result.outputs) == (97, 3, 97)
    assert copies(c) == [(7, "terminal"), (8, "rejected"), (50, "terminal")]
    assert sorted(n for _, n in published(c)) == sorted(set(range(100)) - set(dying))
    assert_in_key_order(published(c))
    assert drive.commit(number, work).repeated
    assert len(copies(c)) == 3


def test_what_is_retried_is_copied_when_it_dies(c: custody.Custody, clock: Clock) -> None:
    make(c)
    publish(c, 10)
    drive, _ = c.drive("in", "g")
    for attempt in (1, 2, 3):
        number = drive.claim(1000).number
        assert number is not None
        drive.commit(number, run(c, drive, number, {3: Outcome("nack", error="no")}))
        assert copies(c) == ([(3, "max_retries_exceeded")] if attempt == 3 else [])
        clock.move(11)


def test_malformed_messages_are_copied(c: custody.Custody) -> None:
    make(c)
    publish(c, 10)
    drive, _ = c.drive("in", "g")
    number = drive.claim(1000).number
    assert number is not None
    part = drive.claimed(number)[0]
    bad = part.ranges[0][0]
    TaskClaim(c.database_url, drive.driver.group_id, number).note_malformed([(part.partition, bad, "not a number")])
    drive.commit(number, run(c, drive, number))
    assert copies(c) == [(c.read("in", part.partition, offset=bad)[0].payload["n"], "terminal")]


def test_a_refused_commit_leaves_no_copy(c: custody.Custody, db: psycopg.Connection) -> None:
    make(c)
    publish(c, 20)
    drive, _ = c.drive("in", "g")
    number = drive.claim(1000).number
    assert number is not None
    work = run(c, drive, number, {7: DEAD})
    db.execute(f"TRUNCATE custody.staged_{drive.driver.group_id}_{number}")
    before = everything(db)
    with pytest.raises(StageLost):
        drive.commit(number, work)
    assert everything(db) == before


def test_a_claim_copies_what_died_of_an_expired_lease(c: custody.Custody, clock: Clock) -> None:
    """A worker of the group has lost a message that it held alone, for the third time."""
    make(c)
    c.publish("in", {"n": 1}, key="k")
    for _ in range(3):
        assert c.claim("in", "g")
        clock.move(31)
    drive, _ = c.drive("in", "g")
    assert drive.claim(1000).number is None
    assert copies(c) == [(1, "lease_expired")]


@pytest.mark.parametrize(("first", "lower", "higher"), [("in", "in-dlq", "out"), ("out", "out", "in-dlq")])
def test_the_heads_of_outputs_and_copies_are_taken_in_one_order(
    c: custody.Custody, db: psycopg.Connection, first: str, lower: str, higher: str
) -> None:
    """While it waits for the topic with the lower number it does not hold the other."""
    make(c, first)
    publish(c, 100)
    drive, _ = c.drive("in", "g")
    number = drive.claim(1000).number
    assert number is not None
    work = run(c, drive, number, dict.fromkeys(range(5), DEAD))
    lock = "SELECT 1 FROM custody.heads h JOIN custody.topics USING (topic_id) WHERE name = %s FOR UPDATE OF h NOWAIT"
    with ThreadPoolExecutor(1) as thread:
        with psycopg.connect(c.database_url) as other:
            other.execute(lock, [lower])
            commit = thread.submit(drive.commit, number, work)
            wait_for(
                lambda: db.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)").fetchone() == (True,),
                "the commit does not wait",
            )
            with db.transaction():
                db.execute(lock, [higher])
        assert (commit.result(30).outputs, len(copies(c))) == (95, 5)
