"""Transactions: several topics and acks, seen whole or not at all; fenced by the epoch; a timeout is an abort."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import everything

from custody import Custody, Delayed, Outgoing, Policy, Receipt
from custody.errors import (
    InvalidArgument,
    InvalidPayload,
    LeaseLost,
    OrderConflict,
    PartitionNotFound,
    ProducerFenced,
    ProducerNotFound,
    QueueFull,
    SequenceConflict,
    TopicNotFound,
    TransactionNotFound,
    TransactionOver,
)

pytestmark = [pytest.mark.core, pytest.mark.req("G12")]


@pytest.fixture
def shop(c: Custody) -> Custody:
    c.create_topic("orders", partitions=2)
    c.create_topic("bills")
    return c


def seen(c: Custody) -> dict[str, list[Any]]:
    return {
        topic: [m.payload for p in range(c.topic(topic).partitions) for m in c.read(topic, p, max_messages=10_000)]
        for topic in ("orders", "bills")
    }


NOTHING: dict[str, list[Any]] = {"orders": [], "bills": []}


def test_nothing_is_seen_before_the_commit_and_everything_after(shop: Custody) -> None:
    with shop.init_producer("p").transaction() as tx:
        tx.publish("orders", 1, partition=1, headers={"h": "1"})
        tx.publish_many("bills", [2, Outgoing(3, key="b")])
        tx.publish("orders", 4, partition=1)
        tx._flush()  # what is collected is sent no later than at the commit
        assert seen(shop) == NOTHING
        assert [(open.messages, open.producer_id) for open in shop.transactions.open()] == [(4, "p")]
    assert seen(shop) == {"orders": [1, 4], "bills": [2, 3]}
    assert tx.receipts == [
        Receipt("orders", 1, 0),
        Receipt("bills", 0, 0),
        Receipt("bills", 0, 1),
        Receipt("orders", 1, 1),
    ]
    assert shop.read("orders", 1)[0].headers == {"h": "1"}
    assert shop.transactions.open() == []


def test_a_repeated_commit_returns_the_same_and_publishes_nothing(shop: Custody) -> None:
    tx = shop.init_producer("p").transaction()
    tx.publish_many("orders", [Outgoing(n, key=str(n)) for n in range(1200)])  # more than is collected at once
    first = tx.commit()
    shop.publish("orders", "other")
    assert shop.transactions.commit(tx.transaction_id) == first
    assert len({(receipt.partition, receipt.offset) for receipt in first if isinstance(receipt, Receipt)}) == 1200
    assert len(seen(shop)["orders"]) == 1201


def test_an_abort_leaves_no_trace_and_no_gap(shop: Custody, db: psycopg.Connection) -> None:
    producer = shop.init_producer("p")
    tx = producer.transaction()
    tx.publish("bills", 1)
    tx.publish("orders", 1)
    tx._flush()
    tx.abort()
    tx.abort()
    with pytest.raises(TransactionOver, match="aborted"):
        tx.commit()
    with pytest.raises(TransactionOver, match="operator"), producer.transaction() as inner:
        shop.transactions.abort(inner.transaction_id, reason="operator")
    with pytest.raises(ZeroDivisionError), producer.transaction() as failed:
        failed.publish("bills", 3 / 0)
    reason = db.execute("SELECT reason FROM custody.transactions WHERE transaction_id = %s", [failed.transaction_id])
    assert reason.fetchone() == ("ZeroDivisionError: division by zero",)
    assert seen(shop) == NOTHING
    assert shop.publish("bills", "next").offset == 0
    assert db.execute("SELECT count(*) FROM custody.transaction_messages").fetchone() == (0,)


def test_a_committed_one_cannot_be_aborted_and_an_unknown_one_is_said_to_be(shop: Custody) -> None:
    tx = shop.init_producer("p").transaction()
    tx.publish("bills", 1)
    tx.commit()
    with pytest.raises(TransactionOver, match="committed"):
        tx.abort()
    with pytest.raises(TransactionOver, match="committed"):
        shop.transactions.add(tx.transaction_id, "bills", [Outgoing(1)])
    for verb in (shop.transactions.commit, shop.transactions.abort):
        with pytest.raises(TransactionNotFound):
            verb(uuid4())
    with pytest.raises(ProducerNotFound):
        shop.transactions.begin("nobody", epoch=None, timeout=None)


@pytest.mark.parametrize("timeout", [None, "5s"])
def test_it_times_out_to_an_abort(shop: Custody, clock: Clock, db: psycopg.Connection, timeout: str | None) -> None:
    producer = shop.init_producer("p")
    tx = producer.transaction(timeout=timeout)
    assert tx.expires_at == clock() + timedelta(seconds=60 if timeout is None else 5)
    tx.publish("bills", 1)
    tx._flush()
    clock.move(60)
    assert shop.transactions.open() == []
    for verb in (tx.commit, lambda: shop.transactions.add(tx.transaction_id, "bills", [Outgoing(1)])):
        with pytest.raises(TransactionOver, match="timed out"):
            verb()
    producer.transaction()  # whoever begins another one clears it away
    assert db.execute("SELECT count(*) FROM custody.transaction_messages").fetchone() == (0,)
    with pytest.raises(TransactionOver, match="timed out"):
        tx.commit()
    assert seen(shop) == NOTHING


@pytest.mark.parametrize("timeout", [0, "2d"])
def test_a_timeout_has_bounds(shop: Custody, timeout: Any) -> None:
    with pytest.raises(InvalidArgument):
        shop.init_producer("p").transaction(timeout=timeout)


@pytest.mark.req("G11")
def test_a_newer_instance_fences_it(shop: Custody) -> None:
    old = shop.init_producer("p")
    tx = old.transaction()
    tx.publish("bills", "old")
    tx._flush()
    new = shop.init_producer("p")
    with pytest.raises(ProducerFenced):
        tx.commit()
    with pytest.raises(ProducerFenced):
        shop.transactions.add(tx.transaction_id, "bills", [Outgoing(1)])
    with pytest.raises(ProducerFenced):
        old.transaction()
    with new.transaction() as mine:
        mine.publish("bills", "new")
    assert seen(shop)["bills"] == ["new"]
    tx.abort()


def test_what_was_consumed_is_acknowledged_with_it(shop: Custody) -> None:
    shop.create_group("orders", "g")
    shop.publish_many("orders", [Outgoing(n, partition=0) for n in range(5)])
    lease = shop.claim("orders", "g", max_messages=5)
    producer = shop.init_producer("p")
    with producer.transaction() as tx:
        tx.publish("bills", "for 0 and 1")
        tx.ack(lease, lease.messages[0])
        tx.ack(lease, lease.messages[1:2])
        assert shop.stats("orders", "g").in_flight == 5
    assert (shop.stats("orders", "g").in_flight, seen(shop)["bills"]) == (3, ["for 0 and 1"])
    with producer.transaction() as rest:
        rest.ack(lease)
    assert shop.stats("orders", "g").depth == 0
    kinds = [(entry.kind, entry.worker) for entry in shop.trace("orders", 0, 1)]
    assert kinds[-1] == ("ack", "test")


@pytest.mark.parametrize("whole", [True, False])
def test_a_lost_lease_refuses_all_of_it(shop: Custody, clock: Clock, db: psycopg.Connection, whole: bool) -> None:
    shop.create_group("orders", "g", Policy(visibility_timeout="10s"))
    shop.publish_many("orders", [Outgoing(n, partition=0) for n in range(3)])
    shop.publish("orders", "another", partition=1)
    kept = shop.claim("orders", "g", partition=1, visibility_timeout="60s")
    lost = shop.claim("orders", "g", partition=0, max_messages=3)
    tx = shop.init_producer("p").transaction()
    tx.publish("bills", "never")
    tx.ack(kept)
    tx.ack(lost) if whole else tx.ack(lost, lost.messages[2])
    tx._flush()
    clock.move(10)
    before = everything(db)
    with pytest.raises(LeaseLost):
        tx.commit()
    assert everything(db) == before
    kept.ack()
    assert seen(shop)["bills"] == []


def test_what_a_lease_lost_since_the_ack_refuses_all_of_it(shop: Custody, clock: Clock) -> None:
    """The other consumer that has it by then publishes what follows from it."""
    shop.create_group("orders", "g", Policy(visibility_timeout="30s"))
    shop.publish_many("orders", [Outgoing(n, partition=0) for n in range(2)])
    producer = shop.init_producer("p")
    lease = shop.claim("orders", "g", max_messages=2)
    tx = producer.transaction(timeout="300s")
    tx.publish_many("bills", [message.payload for message in lease])
    tx.ack(lease)
    lease.extend("100s", message=lease.messages[0])
    clock.move(40)
    other = shop.claim("orders", "g", max_messages=2)
    assert [message.payload for message in other] == [1]
    with pytest.raises(LeaseLost):
        tx.commit()
    with producer.transaction() as theirs:
        theirs.publish("bills", 1)
        theirs.ack(other)
    assert seen(shop)["bills"] == [1]


def test_a_lease_that_holds_nothing_is_refused_at_once(shop: Custody, clock: Clock) -> None:
    shop.create_group("orders", "g")
    shop.publish("orders", 1)
    lease = shop.claim("orders", "g")
    clock.move(31)
    tx = shop.init_producer("p").transaction()
    with pytest.raises(LeaseLost):
        tx.ack(lease)


@pytest.mark.req("K2")
def test_an_ack_out_of_order_refuses_all_of_it(shop: Custody) -> None:
    shop.create_group("orders", "g", Policy(ordering="key"))
    shop.publish_many("orders", [Outgoing(n, key="k") for n in range(2)])
    lease = shop.claim("orders", "g", max_messages=2)
    tx = shop.init_producer("p").transaction()
    tx.publish("bills", 1)
    tx.ack(lease, lease.messages[1])
    with pytest.raises(OrderConflict):
        tx.commit()
    tx.ack(lease, lease.messages[0])
    tx.commit()
    assert shop.stats("orders", "g").depth == 0


@pytest.mark.req("G15")
def test_delays_count_from_the_commit(shop: Custody, clock: Clock) -> None:
    at = clock() + timedelta(seconds=100)
    with shop.init_producer("p").transaction() as tx:
        tx.publish("bills", "delayed", delay="10s")
        tx.publish("bills", "now")
        tx.publish("bills", "at", deliver_at=at)
        tx._flush()
        clock.move(30)
    first, second, third = tx.receipts
    assert isinstance(first, Delayed)
    assert isinstance(third, Delayed)
    assert (first.deliver_at, second, third.deliver_at) == (clock() + timedelta(seconds=10), Receipt("bills", 0, 0), at)
    assert shop.transactions.commit(tx.transaction_id) == tx.receipts
    assert [waiting.payload for waiting in shop.delayed("bills")] == ["delayed", "at"]


def test_bad_input_is_refused_at_once_and_the_rest_can_be_committed(shop: Custody) -> None:
    with shop.init_producer("p").transaction() as tx:
        tx.publish("bills", 1)
        with pytest.raises(InvalidPayload):
            tx.publish("bills", object())
        with pytest.raises(TopicNotFound):
            tx.publish("blils", 1)
        with pytest.raises(InvalidArgument):
            tx.publish("bills", 1, delay="never")
    assert seen(shop)["bills"] == [1]
    tx = shop.init_producer("p").transaction()
    tx.publish("bills", 1, partition=9)
    with pytest.raises(PartitionNotFound):
        tx.commit()


def test_a_full_topic_refuses_all_of_it_until_there_is_room(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    c.create_topic("bills", max_depth=1)
    c.create_group("bills", "g")
    c.publish("bills", 0)
    tx = c.init_producer("p").transaction()
    tx.publish("orders", 1)
    tx.publish("bills", 1)
    tx._flush()
    before = everything(db)
    with pytest.raises(QueueFull):
        tx.commit()
    assert everything(db) == before
    c.claim("bills", "g").ack()
    assert len(tx.commit()) == 2


def test_a_topic_that_was_deleted_fails_the_whole(shop: Custody) -> None:
    tx = shop.init_producer("p").transaction()
    tx.publish("orders", 1)
    tx.publish("bills", 1)
    tx._flush()
    shop.delete_topic("bills")
    with pytest.raises(TopicNotFound):
        tx.commit()
    assert shop.topic("orders").message_count == 0


def test_adding_is_numbered_so_that_a_repeat_adds_nothing(shop: Custody) -> None:
    shop.init_producer("p")
    transaction_id, _ = shop.transactions.begin("p", epoch=None, timeout=None)
    assert shop.transactions.add(transaction_id, "bills", [Outgoing(0), Outgoing(1)], first=0) == 2
    assert shop.transactions.add(transaction_id, "bills", [Outgoing(0), Outgoing(1)], first=0) == 2
    assert shop.transactions.add(transaction_id, "bills", [Outgoing(1), Outgoing(2)], first=1) == 3
    with pytest.raises(SequenceConflict):
        shop.transactions.add(transaction_id, "bills", [Outgoing(9)], first=5)
    assert shop.transactions.add(transaction_id, "bills", [Outgoing(3)]) == 4
    shop.transactions.commit(transaction_id)
    assert seen(shop)["bills"] == [0, 1, 2, 3]


def test_an_empty_one_commits(shop: Custody) -> None:
    with shop.init_producer("p").transaction() as tx:
        pass
    assert tx.receipts == []


def test_receipts_are_remembered_for_a_day(shop: Custody, clock: Clock) -> None:
    producer = shop.init_producer("p")
    tx = producer.transaction()
    tx.publish("bills", 1)
    tx.commit()
    clock.move(86_000)
    producer.transaction()
    assert len(tx.commit()) == 1
    clock.move(1000)
    producer.transaction()
    with pytest.raises(TransactionNotFound):
        tx.commit()


@pytest.mark.req("X1")
@pytest.mark.parametrize("when", ["before the ack", "before the commit"])
def test_consumed_and_published_in_a_transaction_happens_once_beside_a_rewind(shop: Custody, when: str) -> None:
    """Consume, publish, acknowledge the lease: a rewind of its upper half in between must publish nothing twice."""
    shop.create_group("orders", "billing")
    shop.publish_many("orders", [Outgoing(n, partition=0) for n in range(6)])
    producer = shop.init_producer("billing")
    lease = shop.claim("orders", "billing", max_messages=6)
    tx = producer.transaction()
    tx.publish_many("bills", [message.payload for message in lease])
    if when == "before the ack":
        shop.rewind("orders", "billing", to_offset=3, partition=0)
        with pytest.raises(LeaseLost, match="offsets 3, 4, 5") as lost:
            tx.ack(lease)
    else:
        tx.ack(lease)
        shop.rewind("orders", "billing", to_offset=3, partition=0)
        with pytest.raises(LeaseLost, match="offsets 3, 4, 5") as lost:
            tx.commit()
    assert lost.value.lost == (3, 4, 5)
    tx.abort()
    assert seen(shop)["bills"] == []
    lease.release([message for message in lease if message.offset not in lost.value.lost])
    while lease := shop.claim("orders", "billing", max_messages=6):
        with producer.transaction() as tx:
            tx.publish_many("bills", [message.payload for message in lease])
            tx.ack(lease)
    assert sorted(seen(shop)["bills"]) == list(range(6))


@pytest.mark.req("X1")
def test_what_was_settled_before_does_not_count_as_lost_in_a_transaction(shop: Custody) -> None:
    shop.create_group("orders", "billing")
    shop.publish_many("orders", [Outgoing(n, partition=0) for n in range(3)])
    lease = shop.claim("orders", "billing", max_messages=3)
    lease.ack(lease.messages[0])
    lease.nack(lease.messages[1], delay="1h")
    with shop.init_producer("billing").transaction() as tx:
        tx.ack(lease)
    stats = shop.stats("orders", "billing")
    assert (stats.in_flight, stats.depth) == (0, 1)


@pytest.mark.parametrize("topic", [None, "orders"])
def test_upkeep_removes_what_those_that_timed_out_have_left(
    shop: Custody, clock: Clock, db: psycopg.Connection, topic: str | None
) -> None:
    producer = shop.init_producer("p")
    done = producer.transaction()
    done.publish("bills", 0)
    done.commit()
    abandoned = [producer.transaction(timeout="10s") for _ in range(25)]
    alive = producer.transaction(timeout="1h")
    for tx in (*abandoned, alive):
        tx.publish_many("bills", [1, 2])
        tx._flush()
    clock.move(10)
    assert db.execute("SELECT count(*) FROM custody.transaction_messages").fetchone() == (52,)
    shop.maintain(topic)
    assert db.execute("SELECT DISTINCT transaction_id FROM custody.transaction_messages").fetchall() == [
        (alive.transaction_id,)
    ]
    with pytest.raises(TransactionOver, match="timed out"):
        abandoned[-1].commit()
    assert len(done.commit()) == 1, "a commit can be repeated for a day"
    assert len(alive.commit()) == 2
    clock.move(86_401)
    shop.maintain(topic)
    assert db.execute("SELECT count(*) FROM custody.transactions").fetchone() == (0,)
