"""The readers behind `format("custody")`, called as Spark calls them but in this process: every option and filter."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StructType
from tests.conftest import Clock

from custody import Custody, Outgoing
from custody.errors import GroupNotFound, InvalidArgument, OffsetOutOfRange, PartitionNotFound, TopicNotFound
from custody.spark.database import arrow
from custody.spark.format import log_stream
from custody.spark.format.columns import TABLES
from custody.spark.format.log_stream import LogStreamReader, shared
from custody.spark.format.source import CustodySource

pytestmark = pytest.mark.req("S1")

ALL = ReadAllAvailable()
Rows = list[dict[str, Any]]


def reader(url: str, **options: str) -> DataSourceReader:
    return CustodySource({"url": url, "topic": "orders", **options}).reader(StructType())


def read(reader: DataSourceReader) -> Rows:
    """What Spark does: the reader goes to the tasks as a pickle."""
    partitions = reader.partitions() or [InputPartition(None)]
    copy = pickle.loads(pickle.dumps(reader))
    return [row for partition in partitions for batch in copy.read(partition) for row in batch.to_pylist()]


def places(rows: Rows) -> list[tuple[int, int]]:
    return sorted((row["partition"], row["offset"]) for row in rows)


def payloads(rows: Rows) -> list[int]:
    return sorted(int(row["payload"]) for row in rows)


@pytest.fixture
def orders(c: Custody, clock: Clock) -> Custody:
    """Two partitions with ten messages each: 0, 2, 4 … and 1, 3, 5 …, a minute between one pair and the next."""
    c.create_topic("orders", partitions=2)
    for n in range(0, 20, 2):
        keys = [f"k{n % 4}", None]
        c.publish_many("orders", [Outgoing(n + p, partition=p, key=keys[p], headers={"n": str(n)}) for p in (0, 1)])
        clock.move(60)
    return c


# batch


def test_a_row_is_the_message(orders: Custody, database_url: str) -> None:
    rows = read(reader(database_url))
    assert list(rows[0]) == TABLES["events"].fieldNames()
    (row,) = [row for row in rows if (row["partition"], row["offset"]) == (0, 3)]
    message = orders.read("orders", 0, offset=3, max_messages=1)[0]
    assert row == {
        "topic": "orders",
        "partition": 0,
        "offset": 3,
        "key": "k2",
        "payload": b"6",
        "payload_kind": "json",
        "headers": [("n", "6")],
        "published_at": message.published_at,
    }


def test_kinds_and_headers(c: Custody, db: psycopg.Connection, database_url: str) -> None:
    c.create_topic("orders")
    c.publish_many("orders", [{"a": 1}, "text", b"\0"])
    db.execute('SELECT custody.send(\'orders\', \'1\', p_headers => \'{"a": "1", "b": ""}\')')
    rows = read(reader(database_url))
    assert [row["payload_kind"] for row in rows] == ["json", "text", "bytes", "json"]
    assert [row["headers"] for row in rows] == [[], [], [], [("a", "1"), ("b", "")]]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(20)),
        ({"startingOffsets": "latest"}, []),
        ({"startingOffsets": '{"0": 8}'}, [1, 3, 5, 7, 9, 11, 13, 15, 16, 17, 18, 19]),
        ({"startingOffsets": '{"0": -1, "1": -2}', "endingOffsets": '{"1": 2}'}, [1, 3]),
        ({"STARTINGOFFSETS": '{"0": 8, "1": 8}', "endingOffsets": '{"0": 9, "1": 99}'}, [16, 17, 19]),
        ({"endingOffsets": "earliest"}, []),
        ({"startingTimestamp": "2030-01-01T00:08:00Z"}, [16, 17, 18, 19]),
        ({"startingTimestamp": "2030-01-01T01:01:00+01:00", "endingTimestamp": "1893456180000"}, [2, 3, 4, 5]),
    ],
)
def test_where_a_batch_starts_and_ends(
    orders: Custody, database_url: str, options: dict[str, str], expected: list[int]
) -> None:
    assert payloads(read(reader(database_url, **options))) == list(expected)


def _minute(n: int) -> Any:
    return Clock().time + timedelta(minutes=n)


Row = dict[str, Any]


@pytest.mark.parametrize(
    ("pushed", "meaning"),
    [
        (EqualTo(("partition",), 1), lambda r: r["partition"] == 1),
        (In(("partition",), (1, 7)), lambda r: r["partition"] == 1),
        (GreaterThan(("partition",), 0), lambda r: r["partition"] > 0),
        (LessThanOrEqual(("partition",), 0), lambda r: r["partition"] <= 0),
        (EqualTo(("offset",), 4), lambda r: r["offset"] == 4),
        (In(("offset",), (4, 6, 99, None)), lambda r: r["offset"] in (4, 6)),
        (GreaterThan(("offset",), 4), lambda r: r["offset"] > 4),
        (GreaterThanOrEqual(("offset",), 4), lambda r: r["offset"] >= 4),
        (LessThan(("offset",), 4), lambda r: r["offset"] < 4),
        (LessThanOrEqual(("offset",), 4), lambda r: r["offset"] <= 4),
        (EqualTo(("key",), "k2"), lambda r: r["key"] == "k2"),
        (EqualNullSafe(("key",), "k2"), lambda r: r["key"] == "k2"),
        (In(("key",), ("k2", "k0", "'")), lambda r: r["key"] in ("k2", "k0")),
        (In(("key",), ()), lambda _: False),
        (IsNull(("key",)), lambda r: r["key"] is None),
        (IsNotNull(("key",)), lambda r: r["key"] is not None),
        (IsNotNull(("offset",)), lambda _: True),
        (EqualTo(("topic",), "orders"), lambda _: True),
        (EqualTo(("topic",), "others"), lambda _: False),
        (EqualTo(("published_at",), _minute(3)), lambda r: r["published_at"] == _minute(3)),
        (GreaterThan(("published_at",), _minute(3)), lambda r: r["published_at"] > _minute(3)),
        (GreaterThanOrEqual(("published_at",), _minute(3)), lambda r: r["published_at"] >= _minute(3)),
        (LessThan(("published_at",), _minute(3)), lambda r: r["published_at"] < _minute(3)),
        (LessThanOrEqual(("published_at",), _minute(3)), lambda r: r["published_at"] <= _minute(3)),
    ],
    ids=lambda value: repr(value) if isinstance(value, Filter) else "",
)
def test_a_filter_is_taken_on_and_exact(
    orders: Custody, database_url: str, pushed: Filter, meaning: Callable[[Row], bool]
) -> None:
    filtered = reader(database_url)
    assert list(filtered.pushFilters([pushed])) == []
    assert places(read(filtered)) == places([row for row in read(reader(database_url)) if meaning(row)])


@pytest.mark.parametrize(
    "left",
    [
        Not(EqualTo(("key",), "k2")),
        StringStartsWith(("key",), "k"),
        EqualTo(("payload",), b"1"),
        EqualTo(("headers", "n"), "2"),
        EqualTo(("key",), "\0"),
        EqualNullSafe(("key",), None),
        In(("published_at",), (_minute(1), _minute(3))),
        GreaterThan(("key",), "k"),
    ],
    ids=repr,
)
def test_other_filters_are_left_to_spark(orders: Custody, database_url: str, left: Filter) -> None:
    filtered = reader(database_url)
    assert list(filtered.pushFilters([left, EqualTo(("partition",), 0)])) == [left]
    assert len(read(filtered)) == 10


def test_filters_narrow_one_another(orders: Custody, database_url: str) -> None:
    filtered = reader(database_url)
    filters = [
        GreaterThan(("offset",), 2),
        LessThan(("published_at",), _minute(8)),
        In(("partition",), (0, 1)),
        EqualTo(("partition",), 0),
        EqualTo(("key",), "k0"),
    ]
    assert list(filtered.pushFilters(filters)) == []
    assert payloads(read(filtered)) == [8, 12]


def test_a_filter_below_the_first_offset_is_no_data_loss(
    orders: Custody, db: psycopg.Connection, database_url: str
) -> None:
    _drop_what_is_there(db)
    orders.publish("orders", 20, partition=0)
    filtered = reader(database_url)
    filtered.pushFilters([GreaterThan(("offset",), 2)])
    assert payloads(read(filtered)) == [20]


def _drop_what_is_there(db: psycopg.Connection) -> None:
    db.execute("SELECT custody.seal_segment('orders')")
    db.execute("SELECT custody.drop_segments('orders')")


def test_a_start_that_is_gone(orders: Custody, db: psycopg.Connection, database_url: str) -> None:
    _drop_what_is_there(db)
    orders.publish("orders", 20, partition=0)
    with pytest.raises(OffsetOutOfRange, match=r"offset 3 of orders/0 is gone.*failOnDataLoss"):
        read(reader(database_url, startingOffsets='{"0": 3}'))
    assert payloads(read(reader(database_url, startingOffsets='{"0": 3}', failOnDataLoss="false"))) == [20]
    assert payloads(read(reader(database_url))) == [20]


def test_a_long_partition_is_several_tasks(orders: Custody, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "SLICE_ROWS", 4)
    found = reader(database_url)
    assert len(found.partitions()) == 6
    assert payloads(read(found)) == list(range(20))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"startingOffset": "earliest"}, "Did you mean 'startingOffsets'"),
        ({"topic": ""}, "topic is missing"),
        ({"table": "event"}, "Did you mean 'events'"),
        ({"group": "stock"}, "group cannot be used with the table events"),
        ({"table": "journal", "startingOffsets": "latest"}, "startingOffsets cannot be used with the table journal"),
        ({"startingOffsets": "oldest"}, "cannot be 'oldest'"),
        ({"startingOffsets": '{"0": -3}'}, "cannot be"),
        ({"startingOffsets": '{"0": "5"}'}, "cannot be"),
        ({"startingOffsets": "5"}, "cannot be"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp cannot be"),
        ({"startingTimestamp": "2030-01-01T00:00:00"}, "no time zone"),
        ({"startingTimestamp": "0", "startingOffsets": "latest"}, "cannot be combined"),
        ({"maxRowsPerTrigger": "0"}, "maxRowsPerTrigger cannot be"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss cannot be"),
        ({"url": "mysql://user:secret@host/db"}, "postgresql://"),
    ],
)
def test_options_that_are_refused(database_url: str, options: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint) as refused:
        CustodySource({"url": database_url, "topic": "orders", **options}).reader(StructType())
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("option", ["endingOffsets", "endingTimestamp"])
def test_a_stream_has_no_end(database_url: str, option: str) -> None:
    with pytest.raises(InvalidArgument, match=f"does not support {option}"):
        CustodySource({"url": database_url, "topic": "orders", option: "0"}).streamReader(StructType())
    with pytest.raises(InvalidArgument, match="cannot be streamed"):
        CustodySource({"url": database_url, "table": "journal"}).streamReader(StructType())


def test_what_is_not_there(orders: Custody, database_url: str) -> None:
    with pytest.raises(TopicNotFound):
        read(reader(database_url, topic="nope"))
    with pytest.raises(PartitionNotFound, match="no partition 2"):
        read(reader(database_url, startingOffsets='{"2": 0}'))
    with pytest.raises(TopicNotFound):
        read(reader(database_url, topic="nope", table="journal"))
    with pytest.raises(GroupNotFound):
        read(reader(database_url, table="journal", group="nope"))


# views


def test_views(c: Custody, database_url: str) -> None:
    c.create_topic("orders")
    c.create_group("orders", "stock")
    c.create_group("orders", "other")
    c.publish("orders", {"n": 1}, key="a", headers={"h": "1"})
    lease = c.claim("orders", "stock")
    lease.nack(lease.messages[0], error="broken", requeue=False)
    c.claim("orders", "other")
    (dead,) = read(reader(database_url, table="dead_letters"))
    assert list(dead) == TABLES["dead_letters"].fieldNames()
    assert (dead["payload"], dead["payload_bytes"], dead["headers"]) == ('{"n":1}', b'{"n":1}', [("h", "1")])
    assert (dead["errors"], dead["held"], dead["attempts"]) == (["attempt 1: broken"], False, 1)
    deliveries = read(reader(database_url, table="deliveries"))
    assert sorted((row["consumer_group"], row["status"]) for row in deliveries) == [
        ("other", "processing"),
        ("stock", "dead"),
    ]
    assert [row["status"] for row in read(reader(database_url, table="deliveries", group="stock"))] == ["dead"]
    journal = read(reader(database_url, table="journal", group="stock"))
    assert list(journal[0]) == TABLES["journal"].fieldNames()
    claims = [row for row in journal if row["kind"] == "claim"]
    assert [(row["offsets"], row["lease_id"]) for row in claims] == [("{[0,1)}", str(lease.lease_id))]


# streams


@pytest.fixture
def stream(database_url: str) -> Iterator[Callable[..., LogStreamReader]]:
    opened: list[LogStreamReader] = []

    def open_stream(**options: str) -> LogStreamReader:
        source = CustodySource({"url": database_url, "topic": "orders", **options})
        opened.append(source.streamReader(StructType()))
        return opened[-1]

    yield open_stream
    for reader in opened:
        reader.stop()


Streams = Callable[..., LogStreamReader]


def streamed(reader: LogStreamReader, start: dict[str, int], end: dict[str, int]) -> list[int]:
    copy = pickle.loads(pickle.dumps(reader))
    return payloads(
        [r for part in reader.partitions(start, end) for batch in copy.read(part) for r in batch.to_pylist()]
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"0": 0, "1": 0}),
        ({"startingOffsets": "latest"}, {"0": 10, "1": 10}),
        ({"startingOffsets": '{"1": 5}'}, {"0": 0, "1": 5}),
        ({"startingTimestamp": "2030-01-01T00:03:00Z"}, {"0": 3, "1": 3}),
    ],
)
def test_where_a_stream_starts(
    orders: Custody, stream: Streams, options: dict[str, str], expected: dict[str, int]
) -> None:
    opened = stream(**options)
    assert opened.initialOffset() == expected
    orders.publish("orders", 20, partition=0)
    assert opened.initialOffset() == expected


def test_a_stream_goes_from_offset_to_offset(orders: Custody, stream: Streams) -> None:
    opened = stream()
    start = opened.initialOffset()
    end = opened.latestOffset(start, ALL)
    assert (start, end) == ({"0": 0, "1": 0}, {"0": 10, "1": 10})
    assert opened.reportLatestOffset() == end
    assert streamed(opened, start, end) == list(range(20))
    assert streamed(opened, {"0": 8, "1": 10}, end) == [16, 18]
    assert opened.partitions(end, end) == []
    opened.commit(end)


def test_read_limits(orders: Custody, stream: Streams) -> None:
    opened = stream(maxOffsetsPerTrigger="7")
    assert opened.getDefaultReadLimit() == ReadMaxRows(7)
    assert stream().getDefaultReadLimit() == ALL
    start, sizes = {"0": 0, "1": 6}, []
    while (end := opened.latestOffset(start, ReadMaxRows(7))) != {"0": 10, "1": 10}:
        sizes.append(sum(end.values()) - sum(start.values()))
        start = end
    assert sizes == [7]
    assert start == {"0": 4, "1": 9}


@pytest.mark.parametrize(
    ("rows", "available", "expected"),
    [
        (10, [100, 100], [5, 5]),
        (10, [2, 100], [2, 8]),
        (11, [100, 100, 3], [4, 4, 3]),
        (100, [1, 2, 0], [1, 2, 0]),
        (0, [5, 5], [0, 0]),
    ],
)
def test_rows_are_shared_evenly(rows: int, available: list[int], expected: list[int]) -> None:
    taken = shared(rows, {str(p): n for p, n in enumerate(available)}, turn=0)
    assert list(taken.values()) == expected


def test_no_partition_is_passed_over_for_ever() -> None:
    begins = dict.fromkeys("0123", 0)
    for _ in range(8):
        taken = shared(1, dict.fromkeys(begins, 1000), turn=sum(begins.values()))
        begins = {name: begins[name] + taken[name] for name in begins}
    assert begins == dict.fromkeys("0123", 2)


def test_available_now_stops_at_the_ends_it_saw(orders: Custody, stream: Streams) -> None:
    opened = stream()
    opened.prepareForTriggerAvailableNow()
    orders.publish_many("orders", [Outgoing(n, partition=n % 2) for n in range(20, 30)])
    began = time.monotonic()
    end = opened.latestOffset(opened.initialOffset(), ReadMaxRows(15))
    assert opened.latestOffset(end, ALL) == {"0": 10, "1": 10}
    assert opened.latestOffset({"0": 10, "1": 10}, ALL) == {"0": 10, "1": 10}
    assert time.monotonic() - began < log_stream.IDLE_WAIT
    assert opened.reportLatestOffset() == {"0": 15, "1": 15}


def test_an_idle_stream_waits_and_wakes(orders: Custody, stream: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = stream()
    here = {"0": 10, "1": 10}
    monkeypatch.setattr(log_stream, "IDLE_WAIT", 0.2)
    began = time.monotonic()
    assert opened.latestOffset(here, ALL) == here
    assert time.monotonic() - began >= 0.2
    monkeypatch.setattr(log_stream, "IDLE_WAIT", 30.0)
    publisher = threading.Timer(0.1, orders.publish, ["orders", 20], {"partition": 1})
    publisher.start()
    assert opened.latestOffset(here, ALL) == {"0": 10, "1": 11}
    publisher.join()
    assert time.monotonic() - began < 15


def test_a_new_partition_is_read_from_its_start(orders: Custody, stream: Streams) -> None:
    opened = stream()
    end = opened.latestOffset({"0": 10}, ALL)
    assert end == {"0": 10, "1": 10}
    assert streamed(opened, {"0": 10}, end) == list(range(1, 20, 2))


def test_a_stream_whose_place_is_gone(orders: Custody, db: psycopg.Connection, stream: Streams) -> None:
    _drop_what_is_there(db)
    orders.publish("orders", 20, partition=0)
    start, end = {"0": 3, "1": 10}, {"0": 11, "1": 10}
    for call in (lambda r: r.latestOffset(start, ALL), lambda r: r.partitions(start, end)):
        with pytest.raises(OffsetOutOfRange, match="is gone"):
            call(stream())
    careless = stream(failOnDataLoss="false")
    assert careless.latestOffset(start, ALL) == end
    assert streamed(careless, start, end) == [20]


def test_a_stream_whose_topic_was_made_anew(orders: Custody, stream: Streams) -> None:
    orders.delete_topic("orders")
    orders.create_topic("orders")
    orders.publish_many("orders", [0, 1])
    start = {"0": 5, "1": 5}
    for call in (lambda r: r.latestOffset(start, ALL), lambda r: r.partitions({"0": 0, "1": 0}, start)):
        with pytest.raises(OffsetOutOfRange, match="created again"):
            call(stream())
    careless = stream(failOnDataLoss="false")
    end = careless.latestOffset(start, ALL)
    assert end == {"0": 2}
    assert streamed(careless, start, end) == [0, 1]


def test_spark_offsets_are_plain_json(orders: Custody, stream: Streams) -> None:
    opened = stream()
    end = opened.latestOffset(opened.initialOffset(), ALL)
    assert json.loads(json.dumps(end)) == end
