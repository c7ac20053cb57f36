"""Publishers side by side: dense offsets in the order of the commits, and no deadlock whatever they lock."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import psycopg
import pytest
from tests.interleaving.conftest import Make
from tests.interleaving.session import GROUP, TOPIC, Session
from tests.waiting import wait_for

import custody
from custody.errors import TopicNotFound

pytestmark = pytest.mark.core


@pytest.mark.req("C7")
def test_second_publisher_waits_and_continues_without_a_gap(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make()
    assert one.publish(["a", "b"]) == [(0, 0), (0, 1)]
    second = two.blocked(two.publish, ["c"])
    assert c.read(TOPIC) == []
    one.commit()
    assert second.result(10) == [(0, 2)]
    # not committed: nobody may see offset 2 before it is certain, nor build on it
    assert [message.offset for message in c.read(TOPIC)] == [0, 1]
    two.commit()
    assert [message.key for message in c.read(TOPIC)] == ["a", "b", "c"]


def test_rolled_back_publish_leaves_no_hole(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make()
    one.publish(["a", "b"])
    second = two.blocked(two.publish, ["c"])
    one.rollback()
    assert second.result(10) == [(0, 0)]
    two.commit()
    assert [message.key for message in c.read(TOPIC)] == ["c"]


def test_a_reader_never_meets_a_new_offset_below_one_it_has_seen(
    make: Make, c: custody.Custody, database_url: str
) -> None:
    make(partitions=2)
    stop = Event()
    late: list[str] = []

    def read() -> int:
        seen: dict[int, int] = {0: 0, 1: 0}
        with psycopg.connect(database_url, autocommit=True) as connection:
            while True:
                last_look = stop.is_set()
                for partition in (0, 1):
                    rows = connection.execute(
                        'SELECT "offset" FROM custody.read(%s, %s, 0, 100000)', (TOPIC, partition)
                    ).fetchall()
                    # dense from 0 on in every snapshot, so nothing can ever appear below what was seen
                    if [offset for (offset,) in rows] != list(range(len(rows))) or len(rows) < seen[partition]:
                        late.append(f"{partition}: {rows} after {seen[partition]}")
                    seen[partition] = len(rows)
                if last_look:
                    return seen[0] + seen[1]

    def write(number: int) -> None:
        for n in range(25):
            # singles, small batches and COPY, in either order of the partitions
            size = (1, 7, 70)[(number + n) % 3]
            partitions = [(number + i) % 2 for i in range(size)]
            c.publish_many(TOPIC, [custody.Outgoing(n, partition=partition) for partition in partitions])

    with ThreadPoolExecutor(5) as threads:
        reader = threads.submit(read)
        try:
            for writer in [threads.submit(write, number) for number in range(4)]:
                writer.result(60)
        finally:
            stop.set()
        assert reader.result(60) == sum((1, 7, 70)[(number + n) % 3] for number in range(4) for n in range(25))
    assert late == []


def test_two_partitions_named_in_opposite_order_never_deadlock(
    make: Make, c: custody.Custody, one: Session, two: Session, three: Session
) -> None:
    make(partitions=2)
    three.publish(["x"], partitions=[0])
    first = one.blocked(one.publish, ["a", "b"], partitions=[0, 1])
    second = two.blocked(two.publish, ["a", "b"], partitions=[1, 0])
    three.commit()
    # whoever is first has to commit before the other gets anything: both lock partition 0 first
    wait_for(lambda: first.done() or second.done(), "neither publisher got its partitions")
    winner, loser = (one, two) if first.done() else (two, one)
    winner.commit()
    wait_for(lambda: first.done() and second.done(), "the other publisher still waits")
    loser.commit()
    assert {offset for _, offset in first.result() + second.result()} == {0, 1, 2}
    assert c.topic(TOPIC).tails == (3, 2)


def test_many_publishers_to_both_partitions_in_opposite_order(make: Make, c: custody.Custody) -> None:
    make(partitions=2)
    together = Barrier(4)

    def write(number: int) -> None:
        together.wait()
        for _ in range(50):
            partitions = (0, 1) if number % 2 else (1, 0)
            c.publish_many(TOPIC, [custody.Outgoing(None, partition=partition) for partition in partitions])

    with ThreadPoolExecutor(4) as threads:
        for writer in [threads.submit(write, number) for number in range(4)]:
            writer.result(60)
    assert c.topic(TOPIC).tails == (200, 200)


@pytest.mark.req("C7")
def test_expected_offset_is_decided_after_the_wait(make: Make, one: Session, two: Session) -> None:
    make()
    one.publish(["a"])
    message: dict[str, Any] = {"keys": ["b"], "kinds": ["j"], "payloads": [b"1"], "headers": [None]}
    second = two.blocked(two.call, "publish", topic=TOPIC, partitions=[0], expected=0, **message)
    one.commit()
    with pytest.raises(psycopg.Error) as refused:
        second.result(10)
    assert refused.value.diag.message_detail == "offset_conflict"


def test_publish_waits_for_a_seal_and_goes_to_the_new_segment(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make("ab")
    segment = one.seal()
    second = two.blocked(two.publish, ["c"])
    one.commit()
    assert second.result(10) == [(0, 2)]
    two.commit()
    assert [message.key for message in c.read(TOPIC)] == ["a", "b", "c"]
    bound = two.connection.execute(
        "SELECT first_offset FROM custody.segment_bounds WHERE segment_id = %s", (segment,)
    ).fetchone()
    assert bound == (2,)


def test_seal_waits_for_a_publish(make: Make, c: custody.Custody, one: Session, two: Session) -> None:
    make("a")
    one.publish(["b"])
    sealing = two.blocked(two.seal)
    one.commit()
    segment = sealing.result(10)
    two.commit()
    assert c.publish(TOPIC, 3).offset == 2
    assert two.connection.execute(
        "SELECT first_offset FROM custody.segment_bounds WHERE segment_id = %s", (segment,)
    ).fetchone() == (2,)


def test_idempotent_publish_and_seal_do_not_deadlock(
    make: Make, one: Session, two: Session, c: custody.Custody
) -> None:
    """The receipt refers to the topic: with the topic's row locked for update both would wait for each other."""
    make()
    c.init_producer("p")
    one.publish(["a"])  # holds the head
    sealing = two.blocked(two.seal)
    one.call(
        "publish",
        topic=TOPIC,
        partitions=[0],
        keys=["b"],
        kinds=["j"],
        payloads=[b"1"],
        headers=[None],
        producer="p",
        epoch=1,
        sequence=0,
    )
    one.commit()
    sealing.result(10)
    two.commit()
    assert [message.key for message in c.read(TOPIC)] == ["a", "b"]


@pytest.mark.parametrize("batch", [1, 100], ids=["insert", "copy"])
def test_publish_behind_delete_topic_is_a_clear_error(
    make: Make, c: custody.Custody, database_url: str, one: Session, batch: int
) -> None:
    make("a")
    c.publish(TOPIC, 1)
    one.call("delete_topic", topic=TOPIC)
    with ThreadPoolExecutor(1) as thread:
        publish = thread.submit(c.publish_many, TOPIC, [custody.Outgoing(n) for n in range(batch)])
        with psycopg.connect(database_url, autocommit=True) as watch:
            wait_for(
                lambda: (
                    watch.execute(
                        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid)))",
                        (one.connection.info.backend_pid,),
                    ).fetchone()
                    == (True,)
                ),
                "the publish does not wait for the deletion",
            )
        one.commit()
        with pytest.raises(TopicNotFound):
            publish.result(10)


def test_delete_topic_waits_for_a_publish_without_deadlock(make: Make, one: Session, two: Session) -> None:
    make("a", partitions=2)
    one.publish(["b"], partitions=[0])
    deleting = two.blocked(two.call, "delete_topic", topic=TOPIC)
    one.publish(["c"], partitions=[1])
    one.commit()
    deleting.result(10)
    two.commit()
    with pytest.raises(psycopg.Error) as refused:
        one.publish(["d"])
    assert refused.value.diag.message_detail == "topic_not_found"


@pytest.mark.req("G11")
def test_two_who_send_the_same_sequence_at_once_publish_it_once(
    make: Make, c: custody.Custody, one: Session, two: Session
) -> None:
    make(partitions=2)
    c.init_producer("p")

    def publish(session: Session, partition: int) -> list[tuple[Any, ...]]:
        return session.call(
            "publish",
            topic=TOPIC,
            partitions=[partition],
            keys=[None],
            kinds=["j"],
            payloads=[b"1"],
            headers=[None],
            producer="p",
            epoch=1,
            sequence=0,
        )

    assert publish(one, 0) == [(0, 0, False)]
    repeated = two.blocked(publish, two, 1)
    one.commit()
    assert repeated.result(10) == [(0, 0, True)]


@pytest.mark.req("G11", "G12")
def test_a_producer_with_a_transaction_that_is_not_committed_yet_is_not_forgotten(
    c: custody.Custody, one: Session, two: Session
) -> None:
    c.init_producer("p")
    one.call("begin_transaction", producer="p")
    forgetting = two.blocked(two.call, "forget_producer", producer="p")
    one.commit()
    with pytest.raises(psycopg.Error) as refused:
        forgetting.result(10)
    assert refused.value.diag.message_detail == "producer_in_use"


def test_a_publish_beside_delete_topic_that_waits_does_not_deadlock(
    make: Make, one: Session, two: Session, three: Session
) -> None:
    """The deletion has every head before it drops the tables, which a publish needs after its head."""
    make("a")
    three.call("pause", topic=TOPIC, group=GROUP)
    deleting = two.blocked(two.call, "delete_topic", topic=TOPIC)
    publishing = one.blocked(one.publish, ["b"])
    three.commit()
    deleting.result(10)
    two.commit()
    with pytest.raises(psycopg.Error) as refused:
        publishing.result(10)
    assert refused.value.diag.message_detail == "topic_not_found"
