"""Delayed messages between sessions: delivered once whoever finds them due; a cancellation wins or loses."""

from __future__ import annotations

import psycopg
import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("G15")]


def test_two_groups_that_find_it_due_append_it_once(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    make()
    c.create_group(TOPIC, "other")
    c.publish(TOPIC, 1, delay="1s")
    clock.move(1)
    assert one.claim().offsets == [0]
    # the head is held: whoever comes now goes on without it
    assert two.claim(group="other").offsets == []
    two.commit()
    one.commit()
    assert two.claim(group="other").offsets == [0]
    two.commit()
    assert c.topic(TOPIC).message_count == 1


def test_an_open_transaction_that_has_published_stalls_no_claim(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    make("ab")
    c.publish(TOPIC, 1, delay="1s")
    one.publish([None])
    clock.move(2)
    assert two.claim(10).offsets == [0, 1]
    two.commit()
    one.commit()
    assert [message.payload for message in c.claim(TOPIC, GROUP, max_messages=10)] == [1, 1]


def test_pipelines_that_deliver_beside_publishers_do_not_deadlock(
    c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    """The pipeline takes its partitions by what they have to give, the publisher in order."""
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP)
    c.publish_many(TOPIC, [custody.Outgoing(1, partition=0)] * 5)
    c.publish_delayed(TOPIC, [custody.Outgoing(n, partition=n, delay="1s") for n in (0, 1)])
    clock.move(2)
    epoch = one.call("start_pipeline", topic=TOPIC, group=GROUP, driver="a", now=clock())[0][1]
    one.commit()
    two.publish([None], partitions=[0])
    claimed = one.call("claim_batch", topic=TOPIC, group=GROUP, epoch=epoch, max=100, now=clock())
    assert claimed[0][1] == 6
    waiting = two.blocked(two.publish, [None], partitions=[1])
    one.commit()
    assert waiting.result(10) == [(1, 1)]
    two.commit()


def test_a_crash_after_the_delivery_delivers_it_another_time(
    make: Make, c: custody.Custody, one: Session, clock: Clock
) -> None:
    make()
    c.publish(TOPIC, 1, delay="1s")
    clock.move(1)
    assert one.claim().offsets == [0]
    one.rollback()
    assert c.topic(TOPIC).message_count == 0
    assert [message.payload for message in c.claim(TOPIC, GROUP)] == [1]


@pytest.mark.parametrize("cancelled", [True, False])
def test_a_claim_waits_for_a_cancellation(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock, cancelled: bool
) -> None:
    make()
    receipt = c.publish(TOPIC, 1, delay="1s")
    clock.move(1)
    one.call("cancel_delayed", topic=TOPIC, delay_id=receipt.delay_id)
    claim = two.blocked(two.claim)
    one.commit() if cancelled else one.rollback()
    assert claim.result(10).offsets == ([] if cancelled else [0])
    two.commit()


def test_a_cancellation_waits_for_the_delivery(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    make()
    receipt = c.publish(TOPIC, 1, delay="1s")
    clock.move(1)
    one.claim()
    cancel = two.blocked(two.call, "cancel_delayed", topic=TOPIC, delay_id=receipt.delay_id)
    one.commit()
    with pytest.raises(psycopg.DatabaseError, match="no delayed message"):
        cancel.result(10)


def test_one_that_is_stored_late_is_not_passed_by(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    """It is due before one that would have been delivered while its own transaction was still open."""
    make()
    c.publish(TOPIC, "first", delay="1s")
    one.call(
        "publish_delayed",
        topic=TOPIC,
        partitions=[0],
        keys=["k"],
        kinds=["t"],
        payloads=[b"late"],
        headers=[None],
        deliver_at=[clock()],
        delays=[None],
        now=clock(),
    )
    clock.move(5)
    assert two.claim(10).offsets == []  # its head is held: nothing is delivered past it
    two.commit()
    one.commit()
    assert two.claim(10).offsets == [0, 1]
    two.commit()
    assert [message.payload for message in c.read(TOPIC)] == ["late", "first"]


def test_one_that_is_stored_late_among_others_is_not_passed_by(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    """It is due between two that wait already, so its head need not change; it is held all the same."""
    make()
    c.publish(TOPIC, "first", delay="1s")
    c.publish(TOPIC, "last", delay="3s")
    one.call(
        "publish_delayed",
        topic=TOPIC,
        partitions=[0],
        keys=["k"],
        kinds=["t"],
        payloads=[b"late"],
        headers=[None],
        deliver_at=[None],
        delays=[2],
        now=clock(),
    )
    clock.move(5)
    assert two.claim(10).offsets == []
    two.commit()
    one.commit()
    assert two.claim(10).offsets == [0, 1, 2]
    two.commit()
    assert [message.payload for message in c.read(TOPIC)] == ["first", "late", "last"]
