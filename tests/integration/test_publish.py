"""Publishing: one, many, by function and by COPY; order, headers, conditions, limits, refusals that change nothing."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import everything

from custody import Custody, Outgoing, Policy
from custody.errors import (
    InvalidArgument,
    InvalidPayload,
    OffsetConflict,
    PartitionNotFound,
    QueueFull,
    TopicNotFound,
)
from custody.model.placement import partition_for
from custody.verbs import log

pytestmark = pytest.mark.core

# a batch that goes in by one function call, and one that goes in by COPY
COPY_FROM = 64
BY_FUNCTION, BY_COPY = 5, COPY_FROM + 5
BOTH_PATHS = pytest.mark.parametrize("count", [BY_FUNCTION, BY_COPY])
ODD_PAYLOADS: list[Any] = [
    *(b"", b"\x00\xff", "", "a\0b", "🦉", None, True, 1.5, 2**70, [], {}, {"\0": ["ü", {"deep": [None]}]}),
]


@pytest.fixture(autouse=True)
def smaller_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is written by COPY has more messages; what it writes does not depend on their number."""
    monkeypatch.setattr(log, "COPY_FROM", COPY_FROM)


def in_log(c: Custody, topic: str, partition: int = 0) -> list[tuple[Any, ...]]:
    return [(m.key, m.payload, m.headers) for m in c.read(topic, partition, max_messages=1000)]


@pytest.mark.req("G3")
def test_one_message_returns_where_it_went(c: Custody, clock: Clock) -> None:
    c.create_topic("orders")
    receipts = [c.publish("orders", {"n": n}, key="k", headers={"h": str(n)}) for n in range(3)]
    assert [(r.topic, r.partition, r.offset, r.duplicate) for r in receipts] == [
        ("orders", 0, n, False) for n in range(3)
    ]
    message = c.read("orders", offset=1)[0]
    assert (message.topic, message.partition, message.offset) == ("orders", 0, 1)
    assert (message.key, message.payload, message.headers) == ("k", {"n": 1}, {"h": "1"})
    assert (message.attempt, message.published_at) == (0, clock.time)


@pytest.mark.req("G3")
@BOTH_PATHS
def test_a_batch_keeps_its_order_in_each_partition(c: Custody, count: int) -> None:
    c.create_topic("orders", partitions=3)
    receipts = c.publish_many("orders", [Outgoing(n, key=f"k{n % 7}") for n in range(count)])
    for partition in range(3):
        sent = [n for n, receipt in enumerate(receipts) if receipt.partition == partition]
        assert [m.payload for m in c.read("orders", partition, max_messages=1000)] == sent
        assert [receipts[n].offset for n in sent] == list(range(len(sent)))


@pytest.mark.req("G3")
def test_both_paths_store_the_same(c: Custody, db: psycopg.Connection) -> None:
    batch = [
        Outgoing(
            payload, key=[None, "", "key", "🦉"][n % 4], headers=[None, {}, {"a": "ü", "b": ""}][n % 3], partition=0
        )
        for n, payload in enumerate(ODD_PAYLOADS * 8)
    ]
    assert len(batch) > COPY_FROM
    for topic, size in (("copied", len(batch)), ("joined", 8), ("called", 1)):
        c.create_topic(topic)
        for start in range(0, len(batch), size):
            c.publish_many(topic, batch[start : start + size])
    assert in_log(c, "copied") == in_log(c, "joined") == in_log(c, "called")
    assert in_log(c, "copied") == [(m.key, m.payload, dict(m.headers or {})) for m in batch]
    stored = 'SELECT payload_kind, payload_bytes, headers FROM custody.events WHERE topic = %s ORDER BY "offset"'
    copied, joined, called = (db.execute(stored, [topic]).fetchall() for topic in ("copied", "joined", "called"))
    assert copied == joined == called


@pytest.mark.req("G3")
@BOTH_PATHS
def test_a_key_picks_its_partition(c: Custody, count: int) -> None:
    c.create_topic("orders", partitions=8)
    receipts = c.publish_many("orders", [Outgoing(n, key=f"key-{n}") for n in range(count)])
    assert [r.partition for r in receipts] == [partition_for(f"key-{n}", 8) for n in range(count)]


@pytest.mark.req("G3")
def test_messages_without_a_key_are_spread(c: Custody) -> None:
    c.create_topic("orders", partitions=4)
    c.publish_many("orders", [Outgoing(n) for n in range(100)])
    assert c.topic("orders").tails == (25, 25, 25, 25)
    single = {c.publish("orders", n).partition for n in range(60)}
    assert single == {0, 1, 2, 3}


@pytest.mark.req("G3")
def test_a_named_partition_beats_the_key_of_a_message_that_allows_it(c: Custody) -> None:
    c.create_topic("orders", partitions=4)
    other = (partition_for("k", 4) + 1) % 4
    assert c.publish("orders", 1, key="k", partition=other, allow_split=True).partition == other
    assert c.read("orders", other)[0].key == "k"


def test_a_bare_payload_in_a_batch_is_a_message(c: Custody) -> None:
    c.create_topic("orders")
    c.publish_many("orders", [{"n": 1}, "text", Outgoing(b"bytes")])
    assert [m.payload for m in c.read("orders")] == [{"n": 1}, "text", b"bytes"]


def test_an_empty_batch_is_nothing(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    before = everything(db)
    assert c.publish_many("orders", []) == []
    assert everything(db) == before


def test_an_iterator_is_a_batch(c: Custody) -> None:
    c.create_topic("orders")
    assert len(c.publish_many("orders", (Outgoing(n) for n in range(3)))) == 3


@pytest.mark.req("C7")
@BOTH_PATHS
def test_an_expected_offset_lets_the_first_one_through(c: Custody, count: int) -> None:
    c.create_topic("orders", partitions=2)
    batch = [Outgoing(n, partition=1) for n in range(count)]
    c.publish_many("orders", batch, expected_offset=0)
    with pytest.raises(OffsetConflict, match=f"orders/1 is at offset {count}, not at 0"):
        c.publish_many("orders", batch, expected_offset=0)
    assert c.topic("orders").tails == (0, count)
    c.publish("orders", "next", partition=1, expected_offset=count)
    with pytest.raises(OffsetConflict):
        c.publish("orders", "beyond", partition=1, expected_offset=count + 2)


@pytest.mark.req("C7")
def test_an_expected_offset_is_about_one_partition(c: Custody) -> None:
    c.create_topic("orders", partitions=2)
    with pytest.raises(InvalidArgument, match="one partition"):
        c.publish_many("orders", [Outgoing(0, partition=0), Outgoing(1, partition=1)], expected_offset=0)
    assert c.topic("orders").message_count == 0


@pytest.mark.req("C6")
@BOTH_PATHS
def test_a_full_queue_refuses_until_it_is_worked_off(c: Custody, count: int) -> None:
    c.create_topic("orders", max_depth=count)
    c.create_group("orders", "stock")
    batch = [Outgoing(n) for n in range(count)]
    c.publish_many("orders", batch)
    with pytest.raises(QueueFull, match=f"has {count} unresolved messages; 1 more would pass its max_depth of {count}"):
        c.publish("orders", 1)
    lease = c.claim("orders", "stock", max_messages=count)
    with pytest.raises(QueueFull):
        c.publish("orders", "leased is not resolved")
    lease.ack(lease.messages[:2])
    with pytest.raises(QueueFull):
        c.publish_many("orders", batch[:3])
    assert [r.offset for r in c.publish_many("orders", batch[:2])] == [count, count + 1]


@pytest.mark.req("C6")
def test_the_depth_is_that_of_the_slowest_group_and_dead_letters_do_not_count(c: Custody) -> None:
    c.create_topic("orders", max_depth=3)
    c.create_group("orders", "fast", Policy(max_attempts=1))
    c.create_group("orders", "slow")
    c.publish_many("orders", [1, 2, 3])
    c.claim("orders", "fast", max_messages=3).nack(error="dead at once")
    with pytest.raises(QueueFull):
        c.publish("orders", 4)
    c.claim("orders", "slow", max_messages=3).ack()
    assert c.publish("orders", 4).offset == 3


@pytest.mark.req("C6")
def test_without_groups_the_depth_is_what_the_log_holds(c: Custody) -> None:
    c.create_topic("orders", max_depth=2)
    c.publish_many("orders", [1, 2])
    with pytest.raises(QueueFull):
        c.publish("orders", 3)


BAD_MESSAGES: list[tuple[Outgoing, type[Exception]]] = [
    (Outgoing(1, partition=2), PartitionNotFound),
    (Outgoing(1, partition=-1), PartitionNotFound),
    (Outgoing(1, key="a\0b"), InvalidPayload),
    (Outgoing(1, key="\ud800"), InvalidPayload),
    (Outgoing(1, key=7), InvalidPayload),  # type: ignore[arg-type]
    (Outgoing(1, headers={"h": 1}), InvalidPayload),  # type: ignore[dict-item]
    (Outgoing(1, headers={"h": "\0"}), InvalidPayload),
    (Outgoing(1, headers={"h": "\ud800"}), InvalidPayload),
    (Outgoing(float("nan")), InvalidPayload),
    (Outgoing("\ud800"), InvalidPayload),
    (Outgoing({"a": object()}), InvalidPayload),
]


@pytest.mark.req("G20")
@BOTH_PATHS
def test_one_bad_message_refuses_the_batch_and_changes_nothing(c: Custody, db: psycopg.Connection, count: int) -> None:
    c.create_topic("orders", partitions=2)
    before = everything(db)
    for bad, error in BAD_MESSAGES:
        with pytest.raises(error):
            c.publish_many("orders", [*(Outgoing(n) for n in range(count)), bad])
        assert everything(db) == before, bad


@pytest.mark.req("G20")
@BOTH_PATHS
def test_an_unknown_topic_says_what_to_do(c: Custody, count: int) -> None:
    with pytest.raises(TopicNotFound, match=r"there is no topic 'ordres'.*Create it first"):
        c.publish_many("ordres", [Outgoing(n) for n in range(count)])


def test_psql_publishes_json_with_send(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders", partitions=4)
    sent = db.execute("""SELECT * FROM custody.send('orders', '{"n": 1}', 'SKU-1', '{"h": "x"}')""").fetchone()
    assert sent == (partition_for("SKU-1", 4), 0)
    message = c.read("orders", sent[0])[0]
    assert (message.key, message.payload, message.headers) == ("SKU-1", {"n": 1}, {"h": "x"})
    db.execute("SELECT custody.send('orders', '1')")
    assert c.topic("orders").message_count == 2


@pytest.mark.req("C7", "G15", "V10")
@pytest.mark.parametrize("kind", ["delayed", "outbox"])
def test_an_expected_end_is_the_end_that_readers_see(
    c: Custody, clock: Clock, db: psycopg.Connection, kind: str
) -> None:
    """What is due and not in the log yet does not refuse it: it would be undone with the refusal, each time."""
    c.create_topic("orders")
    c.publish("orders", 0)
    if kind == "delayed":
        c.publish("orders", "due", delay="1s")
        clock.move(2)
    else:
        db.execute("SELECT custody.outbox_write('t', '1', 'orders', p_available_at => '2000-01-01')")
    assert c.publish("orders", 1, expected_offset=1).offset == 1
    assert c.publish("orders", 2).offset == 3
