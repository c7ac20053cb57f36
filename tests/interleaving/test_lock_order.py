"""Verbs that lock several rows lock them in one order, so that no two of them deadlock.

Each case is tried from both ends. While somebody holds the last row, the verb waits with all others locked: it locks
them before it does anything. While somebody holds the first one, it waits without a lock on any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session

import custody
from custody import Outgoing
from custody.model.placement import partition_for

pytestmark = [pytest.mark.core, pytest.mark.req("X5", "X15")]

CURSORS = "SELECT partition FROM custody.cursors ORDER BY partition"
HEADS = "SELECT partition FROM custody.heads ORDER BY topic_id, partition"
COPIED = (
    "SELECT partition FROM custody.heads WHERE topic_id = (SELECT topic_id FROM custody.topics WHERE name LIKE '%-dlq')"
    " ORDER BY partition"
)
LEASES = "SELECT part FROM custody.leases ORDER BY group_id, partition, claim_no, part"
EVENTS = "SELECT id FROM custody.outbox ORDER BY id"
PRODUCERS = "SELECT producer_id FROM custody.producers ORDER BY producer_id"


@dataclass(frozen=True, kw_only=True)
class World:
    """What a case is prepared with."""

    c: custody.Custody
    make: Make
    one: Session
    clock: Clock


Verb = Callable[[Session], object]
Prepare = Callable[[World], Verb]


def group_verb(name: str, **arguments: Any) -> Verb:
    return lambda session: session.call(name, topic=TOPIC, group=GROUP, **arguments)


def two_partitions(verb: Verb) -> Prepare:
    def prepare(world: World) -> Verb:
        world.make("ab", partitions=2)
        return verb

    return prepare


def two_leases(verb: Verb) -> Prepare:
    def prepare(world: World) -> Verb:
        world.make("ab")
        for _ in range(2):
            world.one.claim(1)
        world.one.commit()
        return verb

    return prepare


def two_parts(world: World) -> Verb:
    world.make([None] * 300, ordering="none")
    lease = world.one.claim(300)
    world.one.ack(lease.lease_id, 100)  # splits the row
    world.one.commit()
    return lambda session: session.ack_lease(lease.lease_id)


def dying(world: World) -> Verb:
    """Two messages whose copies go to two partitions of the dead-letter topic."""
    world.c.create_topic(f"{TOPIC}-dlq", partitions=2)
    assert (partition_for("d", 2), partition_for("a", 2)) == (1, 0)
    world.make("da", dead_letter="topic")
    lease = world.one.claim(2)
    world.one.commit()
    return lambda session: session.settle(lease.lease_id, {0: "dead", 1: "dead"})


def in_transaction(world: World) -> Verb:
    world.make(partitions=2)
    world.c.init_producer("p")
    transaction, _ = world.c.transactions.begin("p", epoch=None, timeout=None)
    world.c.transactions.add(transaction, TOPIC, [Outgoing(n, partition=n) for n in (1, 0)])
    return lambda session: session.call("commit_transaction", transaction=transaction, now=world.clock())


def two_events(world: World) -> list[tuple[Any, ...]]:
    add = "SELECT custody.outbox_add('e', 'j', '1', 'test:')"
    events = [world.one.connection.execute(add).fetchall()[0] for _ in range(2)]
    world.one.commit()
    return events


def given_up(world: World) -> Verb:
    events = [event for (event,) in two_events(world)]
    return lambda session: session.call("outbox_kill", ids=events)


def replayed(world: World) -> Verb:
    given_up(world)(world.one)
    world.one.commit()
    return lambda session: session.call("outbox_replay")


def published(
    session: Session, delayed: bool, producers: tuple[str | None, str | None] = (None, None), *, wait: bool = True
) -> list[tuple[Any, ...]]:
    """Two requests of a message each, the second one to the first partition."""
    nothing = [None, None]
    return session.call(
        "publish_each",
        requests=[1, 2],
        topics=[TOPIC, TOPIC],
        delayed=[delayed, delayed],
        producers=list(producers),
        epochs=[producer and 1 for producer in producers],
        sequences=[producer and 0 for producer in producers],
        expected=nothing,
        of=nothing,
        priorities=nothing,
        units=[1, 2],
        partitions=[1, 0],
        keys=nothing,
        kinds=["j", "j"],
        payloads=[b"1", b"1"],
        headers=nothing,
        deliver_at=nothing,
        delays=[60, 60] if delayed else nothing,
        wait=wait,
    )


def two_producers(world: World) -> Verb:
    world.make(partitions=2)
    for producer in "ab":
        world.c.init_producer(producer)
    return lambda session: published(session, False, ("b", "a"))


def delayed(session: Session) -> object:
    return session.call(
        "publish_delayed",
        topic=TOPIC,
        partitions=[1, 0],
        keys=[None, None],
        kinds=["j", "j"],
        payloads=[b"1", b"1"],
        headers=[None, None],
        deliver_at=[None, None],
        delays=[60, 60],
    )


def acknowledged(world: World, *, wait: bool = True) -> Callable[[Session], list[tuple[Any, ...]]]:
    two_leases(lambda _: None)(world)
    leases = [lease for (lease,) in world.one.connection.execute(
        "SELECT lease_id FROM custody.leases ORDER BY claim_no DESC"
    ).fetchall()]  # fmt: skip
    world.one.commit()
    nothing = [None, None]
    return lambda session: session.call(
        "ack_each",
        leases=leases,
        first=nothing,
        last=nothing,
        offsets=[],
        topics=nothing,
        groups=nothing,
        partitions=nothing,
        workers=nothing,
        wait=wait,
        now=world.clock(),
    )


LOCKED = {
    "bind": (two_partitions(group_verb("bind")), CURSORS),
    "redrive": (two_partitions(Session.redrive), CURSORS),
    "retry_now": (two_partitions(group_verb("retry_now")), CURSORS),
    "rewind, cursors": (two_partitions(lambda session: session.rewind(0)), CURSORS),
    "rewind, leases": (two_leases(lambda session: session.rewind(0)), LEASES),
    "delete_group, cursors": (two_partitions(group_verb("delete_group")), CURSORS),
    "delete_group, leases": (two_leases(group_verb("delete_group")), LEASES),
    "delete_topic": (two_partitions(lambda session: session.call("delete_topic", topic=TOPIC)), HEADS),
    "settle, parts": (two_parts, LEASES),
    "settle, copies": (dying, COPIED),
    "publish": (two_partitions(lambda session: session.publish([None, None], partitions=[1, 0])), HEADS),
    "publish_delayed": (two_partitions(delayed), HEADS),
    "commit_transaction": (in_transaction, HEADS),
    "seal_segment": (two_partitions(Session.seal), HEADS),
    "drop_segments, cursors": (two_partitions(Session.drop), CURSORS),
    "drop_segments, heads": (two_partitions(Session.drop), HEADS),
    "outbox_kill": (given_up, EVENTS),
    "outbox_replay": (replayed, EVENTS),
    "publish_each, heads": (two_partitions(lambda session: published(session, False)), HEADS),
    "publish_each, delayed": (two_partitions(lambda session: published(session, True)), HEADS),
    "publish_each, producers": (two_producers, PRODUCERS),
    "ack_each": (acknowledged, LEASES),
}


@pytest.mark.parametrize("case", LOCKED)
def test_rows_are_locked_from_the_first_to_the_last(
    c: custody.Custody, make: Make, one: Session, two: Session, three: Session, clock: Clock, case: str
) -> None:
    prepare, rows = LOCKED[case]
    verb = prepare(World(c=c, make=make, one=one, clock=clock))
    every = [row for (row,) in one.connection.execute(rows.encode()).fetchall()]
    assert len(every) == 2

    one.connection.execute(f"{rows} LIMIT 1 FOR UPDATE".encode())
    waiting = two.blocked(verb, two)
    assert free(three, rows) == every[1:], "it waits for the first row, and has locked the last one"
    one.rollback()
    waiting.result(10)
    two.rollback()

    one.connection.execute(f"{rows} OFFSET 1 FOR UPDATE".encode())
    waiting = two.blocked(verb, two)
    assert free(three, rows) == [], "it waits for the last row, and has not locked the first one"
    one.rollback()
    waiting.result(10)


@pytest.mark.req("C5")
@pytest.mark.parametrize("rows", [HEADS, PRODUCERS, LEASES])
def test_requests_that_do_not_wait_are_told_that_they_are_blocked(
    c: custody.Custody, make: Make, one: Session, two: Session, clock: Clock, rows: str
) -> None:
    """The row that is held is needed by the second request; the first one is done."""
    world = World(c=c, make=make, one=one, clock=clock)
    if rows == LEASES:
        ack = acknowledged(world, wait=False)
    else:
        two_producers(world)
    one.connection.execute(f"{rows} LIMIT 1 FOR UPDATE".encode())
    two.connection.execute("SET lock_timeout = '2s'")
    answers = ack(two) if rows == LEASES else published(two, False, ("b", "a"), wait=False)
    codes = [(row[0], row[4 if rows == LEASES else 5]) for row in answers]
    assert codes == [(1, None), (2, "blocked")]


@pytest.mark.parametrize(
    ("verb", "held", "others"),
    [
        ("bind", "custody.cursors", "custody.groups"),  # a claim or delete_group that has the cursor may need the group
        ("delete_group", "custody.pipelines", "custody.cursors"),  # a pipeline that is driven needs its cursors
    ],
)
def test_rows_of_one_kind_are_locked_before_those_of_the_next(
    make: Make, one: Session, two: Session, three: Session, verb: str, held: str, others: str
) -> None:
    make("a")
    one.call("start_pipeline", topic=TOPIC, group=GROUP, driver="one")
    one.commit()
    one.connection.execute(f"SELECT FROM {held} FOR UPDATE".encode())
    waiting = two.blocked(group_verb(verb), two)
    assert free(three, f"SELECT true FROM {others}") == [True]
    one.rollback()
    waiting.result(10)


def free(session: Session, rows: str) -> list[Any]:
    """The rows that nobody has locked."""
    found = session.connection.execute(f"{rows} FOR UPDATE SKIP LOCKED".encode()).fetchall()
    session.rollback()
    return [row for (row,) in found]
