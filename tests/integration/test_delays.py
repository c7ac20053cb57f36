"""Delayed messages: unseen before their time, then in the log by the order of their times; listed and cancelled."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody import Custody, Delayed, Outgoing
from custody.errors import DelayNotFound, InvalidArgument, PartitionNotFound, SequenceConflict, TopicNotFound

pytestmark = [pytest.mark.core, pytest.mark.req("G15")]


@pytest.fixture
def jobs(c: Custody) -> Custody:
    c.create_topic("jobs")
    c.create_group("jobs", "g")
    return c


def payloads(c: Custody, topic: str = "jobs") -> list[Any]:
    return [message.payload for message in c.read(topic, max_messages=1000)]


def claimed(c: Custody, topic: str = "jobs") -> list[Any]:
    lease = c.claim(topic, "g", max_messages=100)
    return [message.payload for message in lease]


def test_nobody_sees_it_before_its_time_and_then_the_next_claim_has_it(jobs: Custody, clock: Clock) -> None:
    receipt = jobs.publish("jobs", {"n": 1}, key="k", headers={"h": "1"}, delay="10s")
    assert isinstance(receipt, Delayed)
    assert receipt == Delayed(
        topic="jobs", partition=0, delay_id=receipt.delay_id, deliver_at=clock() + timedelta(seconds=10)
    )
    clock.move(9.999)
    assert claimed(jobs) == [] == payloads(jobs)
    assert jobs.next_due("jobs", "g") == pytest.approx(0.001)
    clock.move(0.001)
    (message,) = jobs.claim("jobs", "g", max_messages=100)
    assert (message.payload, message.key, message.headers, message.offset) == ({"n": 1}, "k", {"h": "1"}, 0)
    assert message.published_at == clock()
    assert (jobs.delayed("jobs"), jobs.delayed_count("jobs")) == ([], 0)
    assert jobs.next_due("jobs", "g") == pytest.approx(30)  # the lease, and nothing else


def test_a_publish_after_its_time_comes_behind_it(jobs: Custody, clock: Clock) -> None:
    jobs.publish("jobs", "later", key="k", delay="5s")
    jobs.publish("jobs", "before", key="k")
    clock.move(5)
    assert jobs.publish("jobs", "after", key="k").offset == 2
    assert payloads(jobs) == ["before", "later", "after"]
    jobs.publish("jobs", "bulk", delay="5s")
    clock.move(5)
    jobs.publish_many("jobs", [f"many {n}" for n in range(100)])  # by COPY
    assert payloads(jobs)[3:5] == ["bulk", "many 0"]


def test_they_come_in_the_order_of_their_times(jobs: Custody, clock: Clock) -> None:
    for n, delay in enumerate([3, 1, 2, 1]):
        jobs.publish("jobs", n, key="k", delay=delay)
    assert [waiting.payload for waiting in jobs.delayed("jobs")] == [1, 3, 2, 0]
    clock.move(10)
    assert claimed(jobs) == [1, 3, 2, 0]


def test_a_time_of_delivery_may_be_past_and_needs_a_zone(jobs: Custody, clock: Clock) -> None:
    jobs.publish("jobs", "late", deliver_at=clock() - timedelta(hours=1))
    jobs.publish("jobs", "soon", deliver_at=clock() + timedelta(hours=1))
    assert claimed(jobs) == ["late"]
    with pytest.raises(InvalidArgument, match="time zone"):
        jobs.publish("jobs", 1, deliver_at=datetime(2031, 1, 1))
    assert jobs.delayed_count("jobs") == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"delay": "5s", "deliver_at": datetime(2031, 1, 1, tzinfo=UTC)},
        {"delay": -1},
        {"delay": "soon"},
        {"delay": "5s", "expected_offset": 0},
    ],
)
def test_bad_input_is_refused_and_stores_nothing(jobs: Custody, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        jobs.publish("jobs", 1, **bad)
    assert jobs.delayed_count("jobs") == 0


def test_refusals_name_what_is_wrong(jobs: Custody) -> None:
    with pytest.raises(TopicNotFound):
        jobs.publish("jbos", 1, delay="1s")
    with pytest.raises(PartitionNotFound):
        jobs.publish("jobs", 1, delay="1s", partition=7)
    with pytest.raises(InvalidArgument, match="publish_delayed"):
        jobs.publish_many("jobs", [Outgoing(1), Outgoing(2, delay="1s")])
    with pytest.raises(InvalidArgument, match="no delay"):
        jobs.publish_delayed("jobs", [Outgoing(1, delay="1s"), Outgoing(2)])
    with pytest.raises(TopicNotFound):
        jobs.delayed("jbos")
    assert (jobs.delayed_count("jobs"), payloads(jobs)) == (0, [])


def test_listed_by_key_and_cancelled_once(jobs: Custody, clock: Clock) -> None:
    ids = [jobs.publish("jobs", n, key="ab"[n % 2], headers={"n": str(n)}, delay=n + 1).delay_id for n in range(4)]
    first = jobs.delayed("jobs", key="b", limit=1)[0]
    assert (first.delay_id, first.key, first.payload, first.headers) == (ids[1], "b", 1, {"n": "1"})
    assert (first.delayed_at, first.deliver_at) == (clock(), clock() + timedelta(seconds=2))
    jobs.cancel_delayed("jobs", ids[1])
    with pytest.raises(DelayNotFound):
        jobs.cancel_delayed("jobs", ids[1])
    jobs.create_topic("other")
    with pytest.raises(DelayNotFound):
        jobs.cancel_delayed("other", ids[0])
    clock.move(10)
    assert claimed(jobs) == [0, 2, 3]
    with pytest.raises(DelayNotFound):
        jobs.cancel_delayed("jobs", ids[0])


def test_every_partition_has_its_own(c: Custody, clock: Clock) -> None:
    c.create_topic("jobs", partitions=8)
    c.create_group("jobs", "g")
    receipts = c.publish_delayed("jobs", [Outgoing(n, key=str(n), delay=1 + n / 100) for n in range(50)])
    c.publish("jobs", "now", key="0")
    assert {receipt.partition for receipt in receipts} == set(range(8))
    assert c.next_due("jobs", "g") == pytest.approx(1)
    clock.move(2)
    seen: list[Any] = []
    while lease := c.claim("jobs", "g", max_messages=100):
        seen += [message.payload for message in lease]
    assert sorted(map(str, seen)) == sorted(["now", *map(str, range(50))])


def test_a_bare_group_and_a_pipeline_find_them_too(c: Custody, clock: Clock) -> None:
    c.create_topic("jobs", partitions=2)
    c.create_group("jobs", "bare", bare=True)
    c.create_group("jobs", "piped")
    c.publish_delayed("jobs", [Outgoing(n, partition=n, delay="1s") for n in range(2)])
    assert c.fetch("jobs", "bare", 0) == []
    clock.move(1)
    assert [message.payload for message in c.fetch("jobs", "bare", 1)] == [1]
    c.publish("jobs", 2, partition=0, delay="1s")
    clock.move(1)
    drive, _ = c.drive("jobs", "piped")
    batch = drive.claim(max_messages=10)
    assert batch.messages == 3


def test_more_than_one_claim_moves_are_moved_by_several(jobs: Custody, clock: Clock, db: psycopg.Connection) -> None:
    jobs.publish_delayed("jobs", [Outgoing(n, delay=1 + n / 1000) for n in range(2500)])
    clock.move(60)
    seen: list[Any] = []
    while lease := jobs.claim("jobs", "g", max_messages=10_000):
        seen += [message.payload for message in lease]
    assert seen == list(range(2500))
    offsets = [offset for (offset,) in db.execute('SELECT "offset" FROM custody.events ORDER BY 1')]
    assert offsets == list(range(2500))


@pytest.mark.req("G11")
def test_a_repeat_of_an_idempotent_one_returns_the_first_id(jobs: Custody, clock: Clock) -> None:
    producer = jobs.init_producer("p")
    producer.publish("jobs", "now")
    batch = [Outgoing(n, delay=5 + n) for n in range(3)]
    first = producer.publish_delayed("jobs", batch)
    clock.move(60)
    assert claimed(jobs) == ["now", 0, 1, 2]
    again = jobs.publish_delayed("jobs", batch, producer_id="p", epoch=1, sequence=1)
    assert [(r.delay_id, r.deliver_at, r.duplicate) for r in again] == [(r.delay_id, r.deliver_at, True) for r in first]
    assert jobs.delayed_count("jobs") == 0
    assert jobs.producer("p").last_receipt == first[-1]
    with pytest.raises(SequenceConflict, match="with a delay"):
        jobs.publish_many("jobs", [1, 2, 3], producer_id="p", epoch=1, sequence=1)
    with pytest.raises(SequenceConflict, match="without a delay"):
        jobs.publish_delayed("jobs", batch[:1], producer_id="p", epoch=1, sequence=0)
    with pytest.raises(InvalidArgument):
        producer.publish("jobs", 1, delay="1s")


def test_a_deleted_topic_takes_them_along(jobs: Custody, db: psycopg.Connection) -> None:
    jobs.publish("jobs", 1, delay="1s")
    jobs.delete_topic("jobs")
    assert db.execute("SELECT count(*) FROM custody.delayed").fetchone() == (0,)


def test_they_are_appended_to_the_segment_that_is_open_then(
    jobs: Custody, clock: Clock, db: psycopg.Connection
) -> None:
    jobs.publish("jobs", "old")
    jobs.publish("jobs", "delayed", delay="1s")
    db.execute("SELECT custody.seal_segment('jobs')")
    clock.move(1)
    assert claimed(jobs) == ["old", "delayed"]
    assert payloads(jobs) == ["old", "delayed"]


def test_a_waiting_worker_handles_it_when_it_is_due(database_url: str) -> None:
    """With the real clock and a poll far longer: it is the due time that wakes the worker."""
    with custody.connect(database_url) as c:
        c.create_topic("jobs")
        c.create_group("jobs", "g")
        handled: list[float] = []
        enough = threading.Event()

        def handle(message: custody.Message) -> None:
            handled.append((datetime.now(UTC) - datetime.fromisoformat(message.payload)).total_seconds())
            if len(handled) == 20:
                enough.set()

        worker = c.worker_for("jobs", "g", handle, poll="60s")
        thread = threading.Thread(target=worker.run)
        thread.start()
        try:
            start = datetime.now(UTC) + timedelta(seconds=0.2)
            for n in range(20):
                due = start + timedelta(milliseconds=20 * n)
                c.publish("jobs", due.isoformat(), deliver_at=due)
            assert enough.wait(30), handled
        finally:
            worker.stop()
            thread.join(30)
        assert min(handled) >= 0
