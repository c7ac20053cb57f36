"""Upkeep and growth beside everybody else: who maintains gives up at once, and nobody waits behind it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session
from tests.interleaving.test_operators import kill
from tests.interleaving.test_retention import create_group, finish

import custody
from custody import Retention

pytestmark = pytest.mark.core

HOUR = 3600


def maintain(session: Session, clock: Clock) -> list[tuple[Any, ...]]:
    """One step: (did, held by) of it, if there was one."""
    return [(row[1], row[7]) for row in session.call("maintain", topic=TOPIC, now=clock())]


@pytest.fixture
def due(make: Make, c: custody.Custody, one: Session, clock: Clock) -> Callable[..., None]:
    """A segment that is done and due to be dropped; a is dead, if wanted."""

    def _due(*, dead: bool = False) -> None:
        make("abc")
        if dead:
            kill(one, 0)
        finish(one)
        c.set_retention(TOPIC, Retention(time="1h", segment_time="100h"))
        clock.move(2 * HOUR)

    return _due


@pytest.mark.req("V13")
def test_a_long_reader_stops_the_drop_and_nobody_else(
    due: Callable[..., None], c: custody.Custody, one: Session, two: Session, three: Session, clock: Clock
) -> None:
    due()
    one.connection.execute("SELECT count(*) FROM custody.events")  # and its transaction stays open
    waiting = two.start(maintain, two, clock)
    # meanwhile others publish and claim: the rows that they need are taken after the tables
    three.publish(["d"])
    three.commit()
    lease = three.claim(9)
    three.ack_lease(lease.lease_id)
    three.commit()
    assert lease.offsets == [3]
    assert waiting.result(10) == [("busy", None)]
    two.commit()
    assert len(c.read(TOPIC)) == 4
    one.commit()
    assert maintain(two, clock) == [("dropped", None)]
    two.commit()
    assert c.topic(TOPIC).first_offsets == (3,)


@pytest.mark.req("V13")
def test_it_gives_up_within_its_time_out(due: Callable[..., None], one: Session, two: Session, clock: Clock) -> None:
    due()
    one.connection.execute("SELECT count(*) FROM custody.events")
    began = time.monotonic()
    assert maintain(two, clock) == [("busy", None)]
    assert time.monotonic() - began < 5, "it has a time-out of a tenth of a second"


@pytest.mark.req("V13")
def test_two_maintainers_do_not_wait_for_one_another(
    due: Callable[..., None], one: Session, two: Session, clock: Clock
) -> None:
    due()
    assert maintain(one, clock) == [("dropped", None)]
    assert maintain(two, clock) == [("busy", None)]
    one.commit()
    two.commit()
    assert maintain(two, clock) == []


@pytest.mark.req("V13")
@pytest.mark.parametrize("verb", ["claim", "publish", "redrive", "create_group", "rewind"])
def test_a_drop_gives_way_to_a_verb_that_is_not_committed_and_sees_what_it_did(
    due: Callable[..., None], one: Session, two: Session, clock: Clock, verb: str
) -> None:
    due(dead=verb == "redrive")
    if verb == "claim":  # something to claim, in the segment after
        two.publish(["d"])
        two.commit()
    verbs: dict[str, Callable[[], object]] = {
        "claim": lambda: two.claim(1),
        "publish": lambda: two.publish(["e"]),
        "redrive": two.redrive,
        "create_group": lambda: create_group(two),
        "rewind": lambda: two.rewind(1),
    }
    verbs[verb]()
    assert maintain(one, clock) == [("busy", None)]
    one.commit()
    two.commit()
    after = {"redrive": ("held", GROUP), "create_group": ("held", "late"), "rewind": ("held", GROUP)}
    assert maintain(one, clock) == [after.get(verb, ("dropped", None))]
    one.commit()


@pytest.mark.req("V13")
@pytest.mark.parametrize("verb", ["claim", "publish", "redrive", "create_group", "rewind", "settle"])
def test_a_verb_behind_an_open_drop_waits_for_it_or_is_answered(
    due: Callable[..., None], one: Session, two: Session, clock: Clock, verb: str
) -> None:
    due(dead=True)
    two.publish(["d", "e"])
    lease = two.claim(1)
    two.commit()
    assert maintain(one, clock) == [("dropped", None)]
    verbs: dict[str, Callable[[], object]] = {
        "claim": lambda: two.claim(1).reason,
        "publish": lambda: two.publish(["f"]),
        "redrive": two.redrive,
        "create_group": lambda: create_group(two),
        "rewind": lambda: two.rewind(3),
        "settle": lambda: two.ack(lease.lease_id, 3).settled,
    }
    running = two.start(verbs[verb]) if verb in ("claim", "settle") else two.blocked(verbs[verb])
    if verb in ("claim", "settle"):
        assert running.result(10) == ("busy" if verb == "claim" else 1), "neither waits for the drop"
    one.commit()
    running.result(10)
    two.commit()
    if verb == "redrive":
        assert 0 in two.claim(9).attempts, "its event was kept aside before"


@pytest.mark.req("V13")
def test_a_seal_gives_way_to_a_publish_that_is_not_committed(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    make("abc")
    c.set_retention(TOPIC, Retention(time="1h"))
    clock.move(HOUR)
    two.publish(["d"])
    assert maintain(one, clock) == [("busy", None)]
    one.commit()
    two.commit()
    assert maintain(one, clock) == [("sealed", None)]
    one.commit()
    assert c.segments(TOPIC)[0].messages == 4
    assert two.publish(["e"]) == [(0, 4)]


@pytest.mark.req("V13")
def test_a_settle_in_an_open_transaction_holds_what_retention_would_pass(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    """The lease is expired, but locked by somebody who may still commit his ack: it counts as live."""
    make("abc")
    lease = one.claim(9, visibility=HOUR / 2)
    one.commit()
    c.set_retention(TOPIC, Retention(time="1h", drop_unresolved=True))
    one.ack(lease.lease_id, 0)
    clock.move(HOUR)
    assert maintain(two, clock) == [("sealed", None)]
    two.commit()
    clock.move(HOUR)
    assert maintain(two, clock) == [("held", GROUP)]
    two.commit()
    one.commit()
    assert maintain(two, clock) == [("dropped", None)]
    two.commit()
    kinds = [entry.kind for entry in c.trace(TOPIC, 0, 1)]
    assert kinds == ["claim", "expire", "drop"]
    assert [entry.kind for entry in c.trace(TOPIC, 0, 0)] == ["claim", "ack"]


# growth


def publish_placed(session: Session, of: int) -> list[tuple[Any, ...]]:
    return session.call(
        "publish", topic=TOPIC, partitions=[0], keys=["a"], kinds=["j"], payloads=[b"1"], headers=[None], of=of
    )


@pytest.mark.req("V13")
def test_a_publish_that_waited_for_growth_is_told_that_keys_have_moved(make: Make, one: Session, two: Session) -> None:
    make("")
    one.call("grow_topic", topic=TOPIC, partitions=4)
    publishing = two.blocked(publish_placed, two, 1)
    one.commit()
    with pytest.raises(psycopg.Error) as refused:
        publishing.result(10)
    assert refused.value.diag.message_detail == "topic_changed"


@pytest.mark.req("V13")
@pytest.mark.parametrize("verb", ["publish", "claim", "redrive"])
def test_growth_waits_for_what_is_not_committed_and_is_refused_then(
    make: Make, one: Session, two: Session, verb: str
) -> None:
    make("a")
    if verb == "redrive":
        kill(one, 0)
    elif verb == "publish":
        one.ack_lease(one.claim(9).lease_id)
    one.commit()
    verbs: dict[str, Callable[[], object]] = {
        "publish": lambda: two.publish(["a"]),
        "claim": lambda: two.claim(9),
        "redrive": two.redrive,
    }
    verbs[verb]()
    growing = one.blocked(lambda: one.call("grow_topic", topic=TOPIC, partitions=2))
    two.commit()
    with pytest.raises(psycopg.Error) as refused:
        growing.result(10)
    assert refused.value.diag.message_detail == "conflict"
    assert f"group '{GROUP}'" in str(refused.value)


@pytest.mark.req("V13")
def test_a_claim_beside_growth_finds_the_old_partitions_or_all(make: Make, one: Session, two: Session) -> None:
    make("", ordering="none")
    one.call("grow_topic", topic=TOPIC, partitions=3)
    assert two.start(two.claim, 9).result(10).reason in ("busy", "empty")
    two.commit()
    one.commit()
    two.publish(["x", "y", "z"], partitions=[0, 1, 2])
    two.commit()
    assert {two.claim(9).partition for _ in range(3)} == {0, 1, 2}


def test_a_drop_concerns_no_other_topic(
    c: custody.Custody, db: psycopg.Connection, database_url: str, clock: Clock
) -> None:
    """Neither a long reader of another topic stops it, nor does it stop the others."""
    for topic in ("a", "b"):
        c.create_topic(topic)
        c.create_group(topic, "g")
        c.publish_many(topic, [1, 2, 3])
    c.set_retention("a", Retention(time="1h"))
    c.claim("a", "g", max_messages=10).ack()
    clock.move(7200)
    assert [upkeep.did for upkeep in c.maintain("a")] == ["sealed"]
    clock.move(7200)
    found = db.execute("SELECT segment_id FROM custody.segments JOIN custody.topics USING (topic_id) WHERE name = 'b'")
    (segment,) = found.fetchone() or (None,)
    with psycopg.connect(database_url) as reader, psycopg.connect(database_url) as dropper:
        reader.execute(
            psycopg.sql.SQL("SELECT count(*) FROM {}").format(psycopg.sql.Identifier("custody", f"log_{segment}"))
        )
        db.execute("SET lock_timeout = '2s'")
        for _ in range(3):  # when other databases of the server change much, the session may forget the table meanwhile
            # who meets the table for the first time looks at its parent, which is locked until the drop commits at once
            db.execute("SELECT * FROM custody.send('b', '4')")
            did = dropper.execute("SELECT did FROM custody.maintain('a', %s)", [clock()]).fetchone()
            assert did == ("dropped",)
            with suppress(psycopg.errors.LockNotAvailable):
                db.execute("SELECT * FROM custody.send('b', '4')")
                return
            dropper.rollback()
        pytest.fail("a publish to another topic waited for the drop, three times")


@pytest.mark.req("V13")
def test_two_who_maintain_the_journal_do_the_same_step_once(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    make("a")
    c.set_journal_retention(time="10h")
    one.claim()
    one.commit()
    clock.move(HOUR)
    assert [row[1] for row in one.call("maintain_journal", now=clock())] == ["opened"]
    assert two.call("maintain_journal", now=clock()) == []
    one.rollback()
    assert [row[1] for row in two.call("maintain_journal", now=clock())] == ["opened"]
    two.rollback()
