"""Idempotent producers: a repeat leaves one message; gaps, forgotten sequences and older epochs are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import everything
from tests.waiting import wait_for

from custody import Custody, Outgoing, Receipt
from custody.errors import (
    DatabaseUnavailable,
    InvalidArgument,
    InvalidPayload,
    ProducerFenced,
    ProducerInUse,
    ProducerNotFound,
    SequenceConflict,
)
from custody.verbs.producer import IdempotentProducer

pytestmark = pytest.mark.core


def places(receipts: list[Receipt]) -> list[tuple[int, int]]:
    return [(receipt.partition, receipt.offset) for receipt in receipts]


@pytest.mark.req("G11")
def test_a_repeat_returns_the_first_receipts_and_adds_nothing(c: Custody) -> None:
    c.create_topic("orders", partitions=3)
    c.init_producer("p")
    batch = [Outgoing(n) for n in range(10)]
    first = c.publish_many("orders", batch, producer_id="p", epoch=1, sequence=0)
    again = c.publish_many("orders", batch, producer_id="p", epoch=1, sequence=0)
    assert places(again) == places(first)
    assert not any(receipt.duplicate for receipt in first)
    assert all(receipt.duplicate for receipt in again)
    assert c.topic("orders").message_count == 10


@pytest.mark.req("G11")
def test_a_part_of_a_batch_can_be_repeated(c: Custody) -> None:
    c.create_topic("orders", partitions=3)
    c.init_producer("p")
    batch = [Outgoing(n) for n in range(10)]
    first = c.publish_many("orders", batch, producer_id="p", epoch=1, sequence=0)
    assert places(c.publish_many("orders", batch[3:7], producer_id="p", epoch=1, sequence=3)) == places(first[3:7])


@pytest.mark.req("G11")
def test_a_batch_whose_beginning_is_known_adds_only_the_rest(c: Custody) -> None:
    c.create_topic("orders", partitions=2)
    c.init_producer("p")
    batch = [Outgoing(n, key=str(n)) for n in range(8)]
    first = c.publish_many("orders", batch[:3], producer_id="p", epoch=1, sequence=0)
    whole = c.publish_many("orders", batch, producer_id="p", epoch=1, sequence=0)
    assert places(whole[:3]) == places(first)
    assert [receipt.duplicate for receipt in whole] == [True] * 3 + [False] * 5
    assert c.topic("orders").message_count == 8
    stored = {(m.partition, m.offset): m.payload for p in (0, 1) for m in c.read("orders", p)}
    assert [stored[place] for place in places(whole)] == list(range(8))


@pytest.mark.req("G11")
def test_one_sequence_counts_over_all_topics(c: Custody) -> None:
    c.create_topic("orders")
    c.create_topic("bills")
    c.init_producer("p")
    c.publish_many("orders", [1, 2], producer_id="p", epoch=1, sequence=0)
    c.publish_many("bills", [3], producer_id="p", epoch=1, sequence=2)
    with pytest.raises(SequenceConflict):
        c.publish_many("orders", [4], producer_id="p", epoch=1, sequence=4)
    c.publish_many("orders", [4], producer_id="p", epoch=1, sequence=3)
    assert c.publish_many("bills", [3], producer_id="p", epoch=1, sequence=2)[0].duplicate
    assert (c.topic("orders").message_count, c.topic("bills").message_count) == (3, 1)


@pytest.mark.req("G11")
def test_a_sequence_that_was_used_for_another_topic_is_refused(c: Custody) -> None:
    c.create_topic("orders")
    c.create_topic("bills")
    c.init_producer("p")
    c.publish_many("orders", [1], producer_id="p", epoch=1, sequence=0)
    with pytest.raises(SequenceConflict, match="another topic"):
        c.publish_many("bills", [1], producer_id="p", epoch=1, sequence=0)


@pytest.mark.req("G11")
def test_a_gap_is_refused_and_changes_nothing(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    c.init_producer("p")
    c.publish_many("orders", [1], producer_id="p", epoch=1, sequence=0)
    before = everything(db)
    with pytest.raises(SequenceConflict, match=r"sequence 2 leaves a gap after 0. The next sequence is 1"):
        c.publish_many("orders", [3], producer_id="p", epoch=1, sequence=2)
    assert everything(db) == before


@pytest.mark.req("G11")
def test_the_last_thousand_are_remembered_and_older_ones_refused(c: Custody) -> None:
    c.create_topic("orders")
    c.init_producer("p")
    for sequence in range(0, 3000, 100):
        c.publish_many("orders", list(range(100)), producer_id="p", epoch=1, sequence=sequence)
    again = c.publish_many("orders", list(range(1000)), producer_id="p", epoch=1, sequence=2000)
    assert places(again) == [(0, n) for n in range(2000, 3000)]
    with pytest.raises(SequenceConflict, match=r"older than what is remembered.*do not send it again"):
        c.publish_many("orders", [1], producer_id="p", epoch=1, sequence=100)
    assert c.topic("orders").message_count == 3000


@pytest.mark.req("G11")
def test_single_messages_are_remembered_as_far_back(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    producer = c.init_producer("p")
    for n in range(1100):
        producer.publish("orders", n)
    assert c.publish_many("orders", [100], producer_id="p", epoch=1, sequence=100)[0].offset == 100
    with pytest.raises(SequenceConflict):
        c.publish_many("orders", [50], producer_id="p", epoch=1, sequence=50)
    kept = db.execute("SELECT count(*) FROM custody.producer_receipts").fetchone()
    assert kept is not None
    assert kept[0] <= 1001


@pytest.mark.req("G11")
def test_a_new_instance_fences_the_old_one(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("orders")
    old = c.init_producer("p")
    old.publish("orders", 1)
    new = c.init_producer("p")
    assert (old.epoch, new.epoch, new.next_sequence) == (1, 2, 0)
    before = everything(db)
    with pytest.raises(ProducerFenced, match="at epoch 2, not 1"):
        old.publish("orders", 2)
    assert everything(db) == before
    assert new.publish("orders", 2).offset == 1
    with pytest.raises(ProducerFenced):
        c.publish_many("orders", [1], producer_id="p", epoch=3, sequence=0)


@pytest.mark.req("G11")
def test_an_unknown_producer_and_incomplete_identities_are_refused(c: Custody) -> None:
    c.create_topic("orders")
    with pytest.raises(ProducerNotFound, match="Initialise it first"):
        c.publish_many("orders", [1], producer_id="p", epoch=1, sequence=0)
    with pytest.raises(ProducerNotFound):
        c.producer("p")
    with pytest.raises(InvalidArgument, match="needs an id"):
        c.init_producer("")
    c.init_producer("p")
    for incomplete in ({"epoch": 1}, {"sequence": 0}, {"epoch": 1, "sequence": -1}):
        with pytest.raises(InvalidArgument):
            c.publish_many("orders", [1], producer_id="p", **incomplete)


@pytest.mark.req("C8")
def test_the_state_of_a_producer_is_its_epoch_and_last_receipt(c: Custody) -> None:
    c.create_topic("orders", partitions=2)
    producer = c.init_producer("p")
    state = c.producer("p")
    assert (state.epoch, state.last_sequence, state.last_receipt) == (1, -1, None)
    receipts = producer.publish_many("orders", [Outgoing(n, partition=1) for n in range(3)])
    state = c.producer("p")
    assert (state.producer_id, state.epoch, state.last_sequence) == ("p", 1, 2)
    assert state.last_receipt == receipts[-1]


@pytest.mark.req("G11")
def test_the_producer_counts_its_sequence_by_itself(c: Custody) -> None:
    c.create_topic("orders", partitions=2)
    producer = c.init_producer("p")
    assert producer.publish_many("orders", []) == []
    producer.publish("orders", {"n": 0}, key="k", headers={"h": "1"})
    producer.publish_many("orders", [{"n": 1}, Outgoing({"n": 2}, key="k")])
    assert producer.publish("orders", {"n": 3}, partition=1).partition == 1
    assert producer.next_sequence == 4
    with pytest.raises(InvalidPayload):
        producer.publish("orders", object())
    assert producer.next_sequence == 4
    assert not producer.publish("orders", {"n": 4}).duplicate
    assert producer.repeat() == []


class LosesAnswers:
    """Publishes for real, and loses the answer, or the request, when told to."""

    def __init__(self, c: Custody) -> None:
        self.c = c
        self.lose: str | None = None

    def __call__(self, *arguments: Any, **named: Any) -> list[Receipt]:
        lose, self.lose = self.lose, None
        if lose == "request":
            raise DatabaseUnavailable
        receipts = self.c.publish_many(*arguments, **named)
        if lose == "answer":
            raise DatabaseUnavailable
        if lose == "interrupted":
            raise KeyboardInterrupt
        return receipts


@pytest.mark.req("G11", "C8")
@pytest.mark.parametrize("lose", ["request", "answer"])
def test_after_an_unknown_outcome_publishing_the_same_again_leaves_one_message(c: Custody, lose: str) -> None:
    c.create_topic("orders")
    c.init_producer("p")
    network = LosesAnswers(c)
    producer = IdempotentProducer(c.producer("p"), network, c.publish_delayed, c.transactions)
    network.lose = lose
    with pytest.raises(DatabaseUnavailable):
        producer.publish("orders", 1)
    receipt = producer.publish("orders", 1)
    assert (receipt.offset, receipt.duplicate) == (0, lose == "answer")
    assert producer.publish("orders", 2).offset == 1
    assert [m.payload for m in c.read("orders")] == [1, 2]


@pytest.mark.req("G11", "C8")
@pytest.mark.parametrize("lose", ["request", "answer", "interrupted"])
def test_something_else_is_published_after_what_was_left_open(c: Custody, lose: str) -> None:
    c.create_topic("orders")
    c.init_producer("p")
    network = LosesAnswers(c)
    producer = IdempotentProducer(c.producer("p"), network, c.publish_delayed, c.transactions)
    network.lose = lose
    with pytest.raises((DatabaseUnavailable, KeyboardInterrupt)):
        producer.publish_many("orders", [1, 2])
    assert not producer.publish("orders", 3).duplicate
    assert [m.payload for m in c.read("orders")] == [1, 2, 3]


@pytest.mark.req("G11", "C8")
def test_repeat_returns_the_receipts_that_were_lost(c: Custody) -> None:
    c.create_topic("orders")
    c.init_producer("p")
    network = LosesAnswers(c)
    producer = IdempotentProducer(c.producer("p"), network, c.publish_delayed, c.transactions)
    network.lose = "answer"
    with pytest.raises(DatabaseUnavailable):
        producer.publish_many("orders", [1, 2])
    assert [(r.offset, r.duplicate) for r in producer.repeat()] == [(0, True), (1, True)]
    assert producer.repeat() == []
    assert c.topic("orders").message_count == 2


@pytest.mark.req("G11")
def test_a_producer_that_was_forgotten_and_comes_back_fences_its_old_instances(c: Custody) -> None:
    c.create_topic("orders")
    c.init_producer("p")
    old = c.init_producer("p")
    assert c.forget_producer("p")
    new = c.init_producer("p")
    assert (old.epoch, new.epoch, new.next_sequence) == (2, 3, 0)
    new.publish("orders", 1)
    with pytest.raises(ProducerFenced):
        old.publish("orders", 2)
    assert [message.payload for message in c.read("orders")] == [1]
    assert c.forget_producer("p")
    assert (c.init_producer("p").epoch, c.init_producer("p").epoch) == (4, 5)


@pytest.mark.req("G11")
def test_a_producer_that_comes_back_while_it_is_forgotten_is_above_its_old_epoch(
    c: Custody, db: psycopg.Connection
) -> None:
    """The new instance waits for the transaction that forgets the old one, and must see what that has left."""
    c.create_topic("orders")
    for _ in range(3):
        c.init_producer("p")
    with ThreadPoolExecutor(1) as other:
        with db.transaction():
            db.execute("SELECT custody.forget_producer('p')")
            coming = other.submit(c.init_producer, "p")
            wait_for(lambda: _blocked_by(db), "the new instance waits")
        assert coming.result().epoch == 4


def _blocked_by(db: psycopg.Connection) -> bool:
    found = db.execute(
        "SELECT 1 FROM pg_stat_activity a WHERE pg_backend_pid() = ANY (pg_blocking_pids(a.pid)) LIMIT 1"
    ).fetchone()
    return found is not None


@pytest.mark.req("G11", "G12")
def test_only_the_current_instance_and_its_open_transactions_keep_a_producer(c: Custody, clock: Clock) -> None:
    c.init_producer("p")
    c.transactions.begin("p", epoch=1, timeout=60)
    assert c.init_producer("p").epoch == 2
    with pytest.raises(ProducerFenced):
        c.forget_producer("p", epoch=1)
    c.transactions.begin("p", epoch=2, timeout=30)
    assert len(c.transactions.open()) == 2
    with pytest.raises(ProducerInUse):
        c.forget_producer("p", epoch=2)
    clock.move(30)
    assert [transaction.epoch for transaction in c.transactions.open()] == [1]
    assert c.forget_producer("p", epoch=2), "one has timed out, and the other is of an instance that was fenced"
