"""Reading straight into Arrow: the same as reading one by one, whatever is in a message and wherever it lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from tests.integration.stream import GROUP, TOPIC, fill, start
from tests.waiting import wait_for

from custody import Custody, Outgoing
from custody.errors import CustodyError, DatabaseUnavailable, InvalidArgument, OffsetOutOfRange, TopicNotFound
from custody.model import codec
from custody.spark.database import arrow
from custody.spark.database.arrow import Planner
from custody.store.adbc import fetch


@pytest.fixture
def planner(c: Custody, database_url: str) -> Iterator[Planner]:
    with Planner(database_url) as opened:
        yield opened


def rows(batches: Iterator[pa.RecordBatch]) -> list[dict[str, object]]:
    return [row for batch in batches for row in batch.to_pylist()]


def reads(planner: Planner, *, partition: int = 0, topic: str = TOPIC) -> list[arrow.Read]:
    bounds = planner.bounds(topic)[partition]
    return [read for slice in planner.reads(topic, partition, bounds.first, bounds.tail) for read in slice]


def offsets(batches: Iterator[pa.RecordBatch]) -> list[object]:
    return [row["offset"] for row in rows(batches)]


@pytest.mark.req("S1")
def test_the_same_as_reading_one_by_one(
    c: Custody, db: psycopg.Connection, planner: Planner, database_url: str
) -> None:
    c.create_topic(TOPIC)
    strange = [
        Outgoing({"n": 1.5, "ü": [None, True]}, key="a", headers={"trace": "1", "ü": "'\"\\"}),
        Outgoing(b"\0\xff", key=None),
        Outgoing(b"", key=""),
        Outgoing("nul \0 in text", key="it's \\ {} %s"),
        Outgoing(None, headers={}),
    ]
    c.publish_many(TOPIC, strange)
    db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    c.publish_many(TOPIC, strange)
    read = rows(arrow.events(database_url, reads(planner), batch_rows=2))
    messages = c.read(TOPIC)
    assert len(read) == len(messages) == 10
    for row, message in zip(read, messages, strict=True):
        assert (row["partition"], row["offset"], row["key"]) == (0, message.offset, message.key)
        assert codec.decode(str(row["kind"]), row["payload"]) == message.payload  # type: ignore[arg-type]
        assert json.loads(str(row["headers"] or "{}")) == message.headers
        assert row["published_at"] == message.published_at


def test_the_columns_have_these_types(c: Custody, planner: Planner, database_url: str) -> None:
    start(c, 1)
    (batch,) = arrow.events(database_url, reads(planner))
    assert {field.name: str(field.type) for field in batch.schema} == {
        "partition": "int32",
        "offset": "int64",
        "published_at": "timestamp[us, tz=UTC]",
        "key": "string",
        "kind": "string",
        "payload": "binary",
        "headers": "string",
    }


def test_several_ranges_and_batches_of_a_size(c: Custody, planner: Planner, database_url: str) -> None:
    start(c, 20)
    source = reads(planner)[0][0]
    batches = list(arrow.events(database_url, [(source, "{[2,5),[7,8),[15,99)}")], batch_rows=3))
    assert [offset for batch in batches for offset in batch.column("offset").to_pylist()] == [
        2,
        3,
        4,
        7,
        *range(15, 20),
    ]
    assert max(batch.num_rows for batch in batches) == 3
    assert offsets(arrow.events(database_url, [(source, "{}")])) == []
    assert offsets(arrow.events(database_url, [])) == []


def test_conditions(c: Custody, planner: Planner, database_url: str) -> None:
    c.create_topic(TOPIC)
    c.publish_many(TOPIC, [Outgoing(n, key=key) for n, key in enumerate(["a", "it's", None, "a", "\\"])])
    everything = reads(planner)

    def found(*conditions: arrow.Condition) -> list[object]:
        return offsets(arrow.events(database_url, everything, conditions=conditions))

    assert found(("key", "=", "a")) == [0, 3]
    assert found(("key", "in", ["it's", "\\"])) == [1, 4]
    assert found(("key", "in", [])) == []
    assert found(("key", "is null", None)) == [2]
    assert found(("key", "is not null", None), ("offset", ">", 0)) == [1, 3, 4]
    assert found(("published_at", "<", datetime(2000, 1, 1, tzinfo=UTC))) == []
    with pytest.raises(InvalidArgument, match="not an operator"):
        found(("key", "= 'a' OR key =", "b"))
    with pytest.raises(InvalidArgument, match="NUL"):
        found(("key", "=", "\0"))


def test_shares_keep_a_key_together_and_miss_nothing(c: Custody, planner: Planner, database_url: str) -> None:
    c.create_topic(TOPIC)
    c.publish_many(TOPIC, [Outgoing(n, key=f"k{n % 40}" if n % 3 else None) for n in range(300)])
    parts = [rows(arrow.events(database_url, reads(planner), share=(k, 4))) for k in range(4)]
    assert sorted(row["offset"] for part in parts for row in part) == list(range(300))  # type: ignore[type-var]
    assert all(parts)
    keys = [{row["key"] for row in part if row["key"] is not None} for part in parts]
    assert sum(map(len, keys)) == len(set().union(*keys))


def test_slices_cover_every_offset_once_across_segments(
    c: Custody, db: psycopg.Connection, planner: Planner, database_url: str
) -> None:
    c.create_topic(TOPIC)
    for _ in range(3):
        fill(c, 5)
        db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    slices = planner.reads(TOPIC, 0, 1, 14, rows=4)
    assert [offsets(arrow.events(database_url, part)) for part in slices] == [
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11, 12],
        [13],
    ]
    assert planner.reads(TOPIC, 0, 14, 14) == []


def test_what_is_gone_is_refused(c: Custody, db: psycopg.Connection, planner: Planner, database_url: str) -> None:
    c.create_topic(TOPIC)
    fill(c, 5)
    db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    fill(c, 5)
    planned = reads(planner)
    db.execute("SELECT custody.drop_segments(%s)", [TOPIC])
    with pytest.raises(OffsetOutOfRange, match="starts at 5"):
        planner.reads(TOPIC, 0, 4, 10)
    with pytest.raises(OffsetOutOfRange, match="dropped while it was read"):
        list(arrow.events(database_url, planned))
    assert offsets(arrow.events(database_url, reads(planner))) == list(range(5, 10))
    with pytest.raises(TopicNotFound):
        planner.bounds("nope")


def test_views(c: Custody, database_url: str) -> None:
    start(c, 3)
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    lease.nack(lease.messages[0], error="broken", requeue=False)
    columns = ["topic", "consumer_group", "offset", "headers", "errors", "held"]
    assert rows(arrow.view(database_url, "dead_letters", columns, [("consumer_group", "=", GROUP)])) == [
        {
            "topic": TOPIC,
            "consumer_group": GROUP,
            "offset": 0,
            "headers": None,
            "errors": ["attempt 1: broken"],
            "held": False,
        }
    ]
    assert rows(arrow.view(database_url, "dead_letters", columns, [("consumer_group", "=", "other")])) == []
    history = rows(arrow.view(database_url, "history", ["kind", "offsets", "lease_id", "detail"]))
    assert ("claim", "{[0,2)}", str(lease.lease_id)) in [(r["kind"], r["offsets"], r["lease_id"]) for r in history]


def test_one_connection_is_used_again_and_a_broken_one_is_replaced(
    c: Custody, db: psycopg.Connection, database_url: str
) -> None:
    def pid() -> int:
        (batch,) = fetch(database_url, ["SELECT pg_backend_pid()"])
        return int(batch[0][0].as_py())

    first = pid()
    assert pid() == first
    unfinished = fetch(database_url, ["SELECT 1", "SELECT 2"])
    next(unfinished)
    assert pid() != first  # somebody else has it
    assert len(list(unfinished)) == 1
    live = pid()
    db.execute("SELECT pg_terminate_backend(%s)", [live])
    ended = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
    wait_for(lambda: db.execute(ended, [live]).fetchone() == (0,), "the backend did not end")
    assert pid() != live


def test_a_read_that_is_given_up_leaves_nothing_behind(c: Custody, planner: Planner, database_url: str) -> None:
    start(c, 500)
    batches = arrow.events(database_url, reads(planner), batch_rows=10)
    assert next(batches).num_rows == 10
    batches.close()  # type: ignore[attr-defined]
    assert len(offsets(arrow.events(database_url, reads(planner)))) == 500


def test_errors_of_the_database_are_ours(database_url: str) -> None:
    with pytest.raises(DatabaseUnavailable) as refused:
        list(arrow.view("postgresql://user:secret@127.0.0.1:1/x", "history", ["kind"]))
    assert "secret" not in str(refused.value)
    with pytest.raises(CustodyError, match="no_such_column"):
        list(arrow.view(database_url, "history", ["no_such_column"]))
    with pytest.raises(InvalidArgument, match="not a table of the log"):
        arrow.events(database_url, [("pg_class WHERE true", "{[0,1)}")])


def test_which_database(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUSTODY_DATABASE", raising=False)
    monkeypatch.setenv("CUSTODY_HOME", str(tmp_path))
    with pytest.raises(DatabaseUnavailable, match="no embedded one is running"):
        arrow.locate()
    monkeypatch.setenv("CUSTODY_DATABASE", "postgresql:///a")
    assert arrow.locate() == "postgresql:///a"
    assert arrow.locate("postgresql:///b") == "postgresql:///b"
    with pytest.raises(InvalidArgument, match="postgresql://"):
        arrow.locate("mysql://user:secret@host/x")
