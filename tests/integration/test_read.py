"""Reading the log by offset and by time, across segments, and what lies outside it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import fill, offsets

from custody import Custody, Outgoing
from custody.errors import InvalidArgument, OffsetOutOfRange, PartitionNotFound, TopicNotFound

pytestmark = pytest.mark.core


@pytest.fixture
def orders(c: Custody) -> Custody:
    c.create_topic("orders", partitions=2)
    return c


def test_reading_starts_at_the_first_offset_and_changes_nothing(orders: Custody) -> None:
    fill(orders, 5)
    assert offsets(orders.read("orders")) == [0, 1, 2, 3, 4]
    assert offsets(orders.read("orders")) == [0, 1, 2, 3, 4]
    assert orders.read("orders", 1) == []


def test_reading_from_an_offset_up_to_a_number_of_messages(orders: Custody) -> None:
    fill(orders, 10)
    assert offsets(orders.read("orders", offset=3, max_messages=4)) == [3, 4, 5, 6]
    assert offsets(orders.read("orders", offset=8, max_messages=4)) == [8, 9]
    assert orders.read("orders", offset=10) == []
    assert orders.read("orders", offset=1000) == []


def test_reading_across_segments(orders: Custody, db: psycopg.Connection) -> None:
    for n in range(4):
        orders.publish_many("orders", [Outgoing(n * 10 + i, partition=0) for i in range(3)])
        if n != 2:  # the last two batches share a segment
            db.execute("SELECT custody.seal_segment('orders')")
    db.execute("SELECT custody.seal_segment('orders')")  # an empty one
    assert [m.payload for m in orders.read("orders")] == [0, 1, 2, 10, 11, 12, 20, 21, 22, 30, 31, 32]
    assert offsets(orders.read("orders", offset=2, max_messages=5)) == [2, 3, 4, 5, 6]
    assert offsets(orders.read("orders", offset=11)) == [11]
    assert orders.publish("orders", "next", partition=0).offset == 12
    assert orders.topic("orders").tails == (13, 0)


def test_reading_from_a_time(orders: Custody, clock: Clock) -> None:
    begin = clock.time
    for n in range(20):
        orders.publish("orders", n, partition=0)
        orders.publish("orders", n, partition=0)
        clock.move(60)
    assert offsets(orders.read("orders", time=begin, max_messages=1)) == [0]
    assert offsets(orders.read("orders", time=begin - timedelta(days=1), max_messages=1)) == [0]
    for n in range(20):
        at = begin + timedelta(minutes=n)
        assert offsets(orders.read("orders", time=at, max_messages=1)) == [2 * n]
        assert offsets(orders.read("orders", time=at - timedelta(seconds=1), max_messages=1)) == [2 * n]
    assert orders.read("orders", time=begin + timedelta(minutes=19, seconds=1)) == []


def test_times_never_go_back_in_a_partition_whatever_the_clock_does(
    orders: Custody, clock: Clock, db: psycopg.Connection
) -> None:
    begin = clock.time
    for step in (10, 10, -100, 5, 90, -1, 30):
        orders.publish("orders", step, partition=0)
        orders.publish_many("orders", [Outgoing(step, partition=0) for _ in range(70)])
        clock.move(step)
    times = [m.published_at for m in orders.read("orders", max_messages=1000)]
    assert times == sorted(times)
    assert offsets(orders.read("orders", time=begin + timedelta(seconds=20), max_messages=1)) == [142]


def test_times_do_not_go_back_after_a_segment_was_sealed(orders: Custody, clock: Clock, db: psycopg.Connection) -> None:
    begin = clock.time
    fill(orders, 3)
    db.execute("SELECT custody.seal_segment('orders')")
    clock.move(-3600)
    fill(orders, 3)
    assert [m.published_at for m in orders.read("orders")] == [begin] * 6
    assert offsets(orders.read("orders", time=begin)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.req("G20")
def test_what_lies_outside_is_refused(orders: Custody) -> None:
    with pytest.raises(TopicNotFound):
        orders.read("ordres")
    with pytest.raises(PartitionNotFound, match="Its partitions are 0 to 1"):
        orders.read("orders", 2)
    with pytest.raises(OffsetOutOfRange):
        orders.read("orders", offset=-1)
    with pytest.raises(InvalidArgument):
        orders.read("orders", max_messages=0)
    with pytest.raises(InvalidArgument, match="time zone"):
        orders.read("orders", time=datetime(2030, 1, 1))
    with pytest.raises(InvalidArgument, match="not both"):
        orders.read("orders", offset=1, time=datetime(2030, 1, 1, tzinfo=UTC))
    with pytest.raises(PartitionNotFound):
        orders.read("orders", 7, time=datetime(2030, 1, 1, tzinfo=UTC))


@pytest.mark.req("V13")
def test_a_dropped_offset_is_out_of_range_and_the_start_moves_on(orders: Custody, db: psycopg.Connection) -> None:
    fill(orders, 4)
    db.execute("SELECT custody.seal_segment('orders')")
    fill(orders, 2)
    db.execute("SELECT * FROM custody.drop_segments('orders')")
    assert orders.topic("orders").first_offsets == (4, 0)
    assert offsets(orders.read("orders")) == [4, 5]
    with pytest.raises(OffsetOutOfRange, match="offset 3 of orders/0 is gone: the log starts at 4"):
        orders.read("orders", offset=3)
