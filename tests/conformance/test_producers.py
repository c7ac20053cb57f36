"""Idempotent producers and transactions, by either way."""

from __future__ import annotations

import pytest
from tests.conformance.conftest import Fill, refused
from tests.conftest import Clock

import custody
from custody import Outgoing, Receipt

pytestmark = pytest.mark.core


@pytest.mark.req("G11")
def test_a_repeated_publish_is_a_duplicate(c: custody.Custody) -> None:
    c.create_topic("orders")
    producer = c.init_producer("p")
    assert (producer.producer_id, producer.epoch, producer.next_sequence) == ("p", 1, 0)
    assert producer.publish("orders", 1) == Receipt("orders", 0, 0)
    assert [one.offset for one in producer.publish_many("orders", [2, 3])] == [1, 2]
    again = c.publish_many("orders", [2, 3], producer_id="p", epoch=1, sequence=1)
    assert again == [Receipt("orders", 0, 1, True), Receipt("orders", 0, 2, True)]
    mixed = c.publish_many("orders", [3, 4], producer_id="p", epoch=1, sequence=2)
    assert [(one.offset, one.duplicate) for one in mixed] == [(2, True), (3, False)]
    assert [message.payload for message in c.read("orders")] == [1, 2, 3, 4]


@pytest.mark.req("C8", "G11")
def test_a_producer_knows_where_it_stands(c: custody.Custody) -> None:
    c.create_topic("orders")
    with refused("producer_not_found"):
        c.producer("p/ü ?")
    producer = c.init_producer("p/ü ?")
    assert (c.producer("p/ü ?").last_sequence, c.producer("p/ü ?").last_receipt) == (-1, None)
    producer.publish_many("orders", [1, 2])
    state = c.producer("p/ü ?")
    assert (state.epoch, state.last_sequence, state.last_receipt) == (1, 1, Receipt("orders", 0, 1))
    (delayed,) = producer.publish_delayed("orders", [Outgoing(3, delay="1m")])
    assert c.producer("p/ü ?").last_receipt == delayed


@pytest.mark.req("G11")
def test_sequences_and_epochs_are_checked(c: custody.Custody) -> None:
    c.create_topic("orders")
    with refused("producer_not_found"):
        c.publish_many("orders", [1], producer_id="p", epoch=1, sequence=0)
    old = c.init_producer("p")
    old.publish("orders", 1)
    with refused("sequence_conflict"):
        c.publish_many("orders", [2], producer_id="p", epoch=1, sequence=2)
    for part in ({"producer_id": "p"}, {"producer_id": "p", "epoch": 1}, {"epoch": 1, "sequence": 1}):
        with refused("invalid_argument"):
            c.publish_many("orders", [2], **part)  # type: ignore[arg-type]
    assert c.init_producer("p").epoch == 2
    with refused("producer_fenced"):
        old.publish("orders", 2)
    with refused("invalid_argument"):
        c.init_producer("")


@pytest.mark.req("G11")
def test_a_forgotten_producer_starts_anew(c: custody.Custody, clock: Clock) -> None:
    c.create_topic("orders")
    old = c.init_producer("p")
    old.publish("orders", 1)
    new = c.init_producer("p")
    with refused("producer_fenced"):
        c.forget_producer("p", epoch=old.epoch)
    transaction = new.transaction(timeout="10s")
    with refused("producer_in_use"):
        c.forget_producer("p")
    transaction.abort()
    new.transaction(timeout="10s")
    clock.move(10)  # timed out: nothing can come of it any more
    assert c.forget_producer("p", epoch=new.epoch) is True
    assert c.forget_producer("p") is False
    with refused("producer_not_found"):
        c.producer("p")
    assert c.init_producer("p").epoch > new.epoch  # an instance from before stays fenced


@pytest.mark.req("G12")
def test_a_transaction_is_seen_whole(orders: custody.Custody, fill: Fill) -> None:
    orders.create_topic("out", partitions=2)
    fill(3)
    lease = orders.claim("orders", "stock", max_messages=3)
    with orders.init_producer("p").transaction() as transaction:
        transaction.publish("out", 1, partition=0)
        transaction.publish_many("out", [Outgoing(2, partition=1, headers={"a": "b"}), Outgoing(3, partition=1)])
        transaction.publish("orders", 4, key="k9", delay="1m")
        transaction.ack(lease, lease.messages[0])
        (open_one,) = orders.transactions.open()
        assert (open_one.producer_id, open_one.epoch, open_one.acks) == ("p", 1, 1)
        assert orders.topic("out").message_count == 0
    assert [type(one).__name__ for one in transaction.receipts] == ["Receipt", "Receipt", "Receipt", "Delayed"]
    assert [message.payload for message in orders.read("out", 1)] == [2, 3]
    assert orders.stats("orders", "stock").in_flight == 2
    assert orders.transactions.commit(transaction.transaction_id) == transaction.receipts
    assert orders.transactions.open() == []


@pytest.mark.req("G12")
def test_an_aborted_transaction_leaves_nothing(c: custody.Custody, clock: Clock) -> None:
    c.create_topic("out")
    producer = c.init_producer("p")
    failed = producer.transaction()
    failed.publish("out", 1)
    error = ZeroDivisionError("a handler failed")
    failed.__exit__(type(error), error, None)
    with refused("transaction_over"):
        failed.commit()
    late = producer.transaction(timeout="5s")
    late.publish("out", 2)
    clock.move(5)
    with refused("transaction_over"):
        late.commit()
    fenced = producer.transaction()
    c.init_producer("p")
    fenced.publish("out", 3)
    with refused("producer_fenced"):
        fenced.commit()
    assert c.topic("out").message_count == 0
    assert c.transactions.abort(failed.transaction_id) is False


@pytest.mark.req("G12")
def test_transactions_refuse_what_makes_no_sense(c: custody.Custody) -> None:
    c.create_topic("out")
    with refused("producer_not_found"):
        c.transactions.begin("nobody", epoch=None, timeout=None)
    producer = c.init_producer("p")
    with refused("invalid_argument"):
        producer.transaction(timeout="2d")
    transaction = producer.transaction()
    with refused("topic_not_found"):
        transaction.publish("nothing", 1)
    with refused("invalid_payload"):
        transaction.publish("out", float("nan"))
    assert c.transactions.add(transaction.transaction_id, "out", [Outgoing(1)], first=0) == 1
    assert c.transactions.add(transaction.transaction_id, "out", [Outgoing(1)], first=0) == 1
    with refused("sequence_conflict"):
        c.transactions.add(transaction.transaction_id, "out", [Outgoing(1)], first=5)
    assert c.transactions.abort(transaction.transaction_id) is True


def test_an_ack_in_a_transaction_is_of_what_its_lease_holds(orders: custody.Custody, fill: Fill) -> None:
    fill(1)
    lease = orders.claim("orders", "stock")
    producer = orders.init_producer("p")
    for offset in (-1, 7, 2**62 + 1):
        transaction = producer.transaction()
        with refused("lease_lost"):  # at once, or by the commit
            orders.transactions.ack(transaction.transaction_id, lease.lease_id, [0, offset])
            transaction.commit()
    with producer.transaction() as transaction:
        orders.transactions.ack(transaction.transaction_id, lease.lease_id, (0,))
    assert orders.stats("orders", "stock").depth == 0
