"""Deaths side by side: copies queue for the head of their partition, and a copy is replayed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session

import custody
from custody.errors import Conflict
from custody.model.placement import partition_for

pytestmark = [pytest.mark.core, pytest.mark.req("G10")]

DLQ = f"{TOPIC}-dlq"
COPIED = {"dead_letter": "topic", "max_attempts": 1}


def copies(c: custody.Custody, partition: int = 0) -> list[int]:
    """The source offsets of the copies in a partition of the dead-letter topic."""
    return [int(message.headers["x-custody-original-offset"]) for message in c.read(DLQ, partition, max_messages=100)]


def replay(session: Session, clock: Clock, offset: int = 0) -> list[tuple[Any, ...]]:
    return session.call("replay_dead_letter", dlq_topic=DLQ, partition=0, offset=offset, actor="op", now=clock())


def two_leases(make: Make, one: Session, two: Session) -> tuple[Any, Any]:
    make("ab", **COPIED)
    first = one.claim(1).lease_id
    one.commit()
    second = two.claim(1).lease_id
    two.commit()
    return first, second


def test_two_deaths_into_one_partition_queue_for_its_head(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    first, second = two_leases(make, one, two)
    one.nack(first, 0)
    waiting = two.blocked(two.nack, second, 1)
    one.commit()
    assert waiting.result(10).dead == [1]
    two.commit()
    assert copies(c) == [0, 1]
    assert [message.offset for message in c.read(DLQ)] == [0, 1]


def test_a_death_that_is_rolled_back_leaves_its_place_to_the_next(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    first, second = two_leases(make, one, two)
    one.nack(first, 0)
    waiting = two.blocked(two.nack, second, 1)
    one.rollback()
    waiting.result(10)
    two.commit()
    assert copies(c) == [1]
    assert [message.offset for message in c.read(DLQ)] == [0], "dense"


def test_a_settle_in_which_nobody_dies_does_not_wait_for_the_head(make: Make, one: Session, two: Session) -> None:
    first, second = two_leases(make, one, two)
    one.nack(first, 0)
    assert two.ack(second, 1).settled == 1
    two.commit()
    one.commit()


def test_claims_go_on_while_a_death_is_not_committed(make: Make, one: Session, two: Session) -> None:
    make("abc", **COPIED)
    lease = one.claim(1)
    one.commit()
    one.nack(lease.lease_id, 0)
    assert two.claim(9).offsets == [1, 2]


def test_a_publish_to_the_dead_letter_topic_and_a_death_take_turns(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    make("a", **COPIED)
    lease = one.claim(1)
    one.commit()
    two.call("reserve", topic=DLQ, partitions=[0], counts=[1], now=clock())
    waiting = one.blocked(one.nack, lease.lease_id, 0)
    two.call(
        "publish", topic=DLQ, partitions=[0], keys=[None], kinds=["j"], payloads=[b"1"], headers=[None], now=clock()
    )
    two.commit()
    waiting.result(10)
    one.commit()
    assert [message.payload for message in c.read(DLQ)] == [1, {"n": 0}]


def test_a_segment_sealed_while_a_death_waits_is_not_written_to(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    make("a", **COPIED)
    lease = one.claim(1)
    one.commit()
    two.call("seal_segment", topic=DLQ, now=clock())
    waiting = one.blocked(one.nack, lease.lease_id, 0)
    two.call("seal_segment", topic=DLQ, now=clock())
    two.commit()
    waiting.result(10)
    one.commit()
    assert copies(c) == [0]
    two.call("drop_segments", topic=DLQ)
    two.commit()
    assert copies(c) == [0]


def test_deaths_of_many_partitions_in_one_claim_take_their_heads_in_order(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    """A claim folds one partition after the other, in any order; the heads are taken at its end, the lowest first."""
    make(partitions=2, **COPIED)
    c.publish_many(TOPIC, [custody.Outgoing(n, partition=n) for n in range(2)])
    for partition in (0, 1):
        c.claim(TOPIC, GROUP, partition=partition)
    clock.move(31)
    two.connection.execute(
        "SELECT 1 FROM custody.heads JOIN custody.topics USING (topic_id) WHERE name = %s AND partition = 0 FOR UPDATE",
        [DLQ],
    )
    waiting = one.blocked(one.claim)
    with psycopg.connect(c.database_url) as third:  # the higher one is not held while it waits for the lower one
        third.execute(
            "SELECT 1 FROM custody.heads h JOIN custody.topics USING (topic_id)"
            " WHERE name = %s AND partition = 1 FOR UPDATE OF h NOWAIT",
            [DLQ],
        )
    two.rollback()
    assert waiting.result(10).reason == "empty"
    one.commit()
    assert [copies(c, partition) for partition in (0, 1)] == [[0], [0]]


def test_settles_with_deaths_across_partitions_do_not_deadlock(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    """Each has a death for either partition of the dead-letter topic, named in opposite order."""
    keys = [next(k for k in map(str, range(99)) if partition_for(k, 2) == p) for p in (0, 1)]
    make([keys[0], keys[1]], partitions=2, ordering="none", **COPIED)
    c.create_group(TOPIC, "other", custody.Policy(max_attempts=1, dead_letter="topic"))
    mine = one.claim(2, partition=0)
    yours = two.claim(2, partition=0, group="other")
    one.commit()
    two.commit()
    one.settle(mine.lease_id, {0: "nack", 1: "nack"})
    waiting = two.blocked(two.settle, yours.lease_id, {1: "nack", 0: "nack"})
    one.commit()
    assert sorted(waiting.result(10).dead) == [0, 1]
    two.commit()
    assert [copies(c, partition) for partition in (0, 1)] == [[0, 0], [1, 1]]


def test_replayed_twice_at_once_is_one_message(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    make("a", **COPIED)
    c.claim(TOPIC, GROUP).nack()
    assert replay(one, clock) == [(TOPIC, 0, 1, False, True)]
    waiting = two.blocked(replay, two, clock)
    one.commit()
    assert waiting.result(10) == [(TOPIC, 0, 1, True, True)]
    two.commit()
    assert c.topic(TOPIC).message_count == 2


def test_the_second_replay_does_it_if_the_first_is_rolled_back(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock
) -> None:
    make("a", **COPIED)
    c.claim(TOPIC, GROUP).nack()
    replay(one, clock)
    waiting = two.blocked(replay, two, clock)
    one.rollback()
    assert waiting.result(10) == [(TOPIC, 0, 1, False, True)]
    two.commit()
    assert c.topic(TOPIC).message_count == 2
    assert c.dead(TOPIC, GROUP) == []


@pytest.mark.parametrize("verb", ["redrive", "replay"])
def test_redriven_or_replayed_but_only_one_of_them_takes_the_case(
    make: Make, c: custody.Custody, one: Session, two: Session, clock: Clock, verb: str
) -> None:
    make("a", **COPIED)
    c.claim(TOPIC, GROUP).nack()
    both: list[Callable[[], Any]] = [one.redrive, lambda: replay(two, clock)]
    if verb == "redrive":
        assert both[0]() == [(0, 0)]
        waiting = two.blocked(both[1])
        one.commit()
        assert waiting.result(10) == [(TOPIC, 0, 1, False, False)], "published, and the case left to the redrive"
        two.commit()
        assert c.stats(TOPIC, GROUP).waiting == 1
    else:
        assert both[1]() == [(TOPIC, 0, 1, False, True)]
        waiting = one.blocked(both[0])
        two.commit()
        assert waiting.result(10) == []
        one.commit()
        assert c.stats(TOPIC, GROUP).waiting == 0


def test_the_topic_cannot_be_deleted_while_a_group_is_about_to_write_to_it(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("a")
    c.create_topic(DLQ)
    one.connection.execute(
        "SELECT custody.update_group(%s, %s, %s)", [TOPIC, GROUP, '{"ordering": "key", "dead_letter": "topic"}']
    )
    waiting = two.blocked(two.call, "delete_topic", topic=DLQ)
    one.commit()
    with pytest.raises(psycopg.DatabaseError, match="writes its dead letters"):
        waiting.result(10)
    two.rollback()
    with pytest.raises(Conflict):
        c.delete_topic(DLQ)


def test_a_group_that_comes_while_the_topic_is_deleted_makes_it_anew(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("a")
    c.create_topic(DLQ, partitions=3)
    one.call("delete_topic", topic=DLQ)
    waiting = two.start(
        two.connection.execute,
        "SELECT custody.update_group(%s, %s, %s)",
        [TOPIC, GROUP, '{"ordering": "key", "dead_letter": "topic"}'],
    )
    one.commit()
    waiting.result(10)
    two.commit()
    assert c.topic(DLQ).partitions == 1


def test_a_death_under_a_policy_that_has_just_changed_goes_without_a_copy(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    """It read the policy, waited for the head, and meanwhile the policy was changed and the topic deleted."""
    make("a", **COPIED)
    lease = one.claim(1)
    one.commit()
    two.connection.execute(
        "SELECT custody.update_group(%s, %s, %s)", [TOPIC, GROUP, '{"ordering": "key", "dead_letter": "keep"}']
    )
    two.call("delete_topic", topic=DLQ)
    waiting = one.blocked(one.nack, lease.lease_id, 0)
    two.commit()
    assert waiting.result(10).dead == [0]
    one.commit()
    assert len(c.dead(TOPIC, GROUP)) == 1
