"""A publish whose request or answer was lost is sent again, and leaves one message."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from tests.remote.cutting import Proxy, When
from tests.waiting import wait_for

import custody
from custody import Outgoing, Receipt
from custody.errors import DatabaseUnavailable, QueueFull, TopicNotFound

pytestmark = pytest.mark.core

STOPPING = b'{"error": {"code": "stopping", "message": "The server is about to stop."}}'
UNAVAILABLE = b'{"error": {"code": "database_unavailable", "message": "gone"}}'


def payloads(c: custody.Custody) -> list[Any]:
    return [message.payload for message in c.read("orders")]


@pytest.mark.req("G11")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_lost_publish_is_sent_again_and_arrives_once(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, when: When, times: int
) -> None:
    c.create_topic("orders")
    assert remote.publish("orders", 0).offset == 0
    proxy.lose("POST /messages", when, times=times)
    assert remote.publish("orders", 1, expected_offset=1) == Receipt("orders", 0, 1)
    proxy.lose("POST /messages", when, times=times)
    assert remote.publish_many("orders", [2, 3]) == [Receipt("orders", 0, 2), Receipt("orders", 0, 3)]
    proxy.lose("POST /messages", when, times=times)
    remote.publish("orders", 4, delay="1s")
    assert (proxy.waiting, payloads(c), c.delayed_count("orders")) == (0, [0, 1, 2, 3], 1)


@pytest.mark.parametrize(("status", "body"), [(503, STOPPING), (503, UNAVAILABLE), (502, b"<h1>Bad Gateway</h1>")])
def test_an_answer_that_passes_is_waited_for(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, status: int, body: bytes
) -> None:
    c.create_topic("orders")
    proxy.answer("POST /messages", status, body, times=2)
    assert remote.publish("orders", 1) == Receipt("orders", 0, 0)
    assert proxy.count("POST /messages") == 3


def test_a_refusal_is_final(c: custody.Custody, remote: custody.Custody, proxy: Proxy) -> None:
    with pytest.raises(TopicNotFound):
        remote.publish("orders", 1)
    assert proxy.count("POST /messages") == 1
    c.create_topic("orders", max_depth=1)
    c.create_group("orders", "g")
    remote.publish("orders", 1)
    with pytest.raises(QueueFull):
        remote.publish("orders", 2)
    assert proxy.count("POST /messages") == 3
    c.claim("orders", "g").ack()
    assert remote.publish("orders", 3).offset == 1  # the refused ones have used no sequence
    assert proxy.count("POST /producers/init") == 1


@pytest.mark.req("C8")
def test_an_outcome_that_stays_unknown_is_said_and_does_not_touch_the_next_publish(
    c: custody.Custody, proxy: Proxy, db: psycopg.Connection
) -> None:
    c.create_topic("orders")
    with custody.connect(proxy.url, retry_for="100ms") as remote:
        remote.publish("orders", 0)
        proxy.lose("POST /messages", "after", times=1000)
        with pytest.raises(DatabaseUnavailable, match="unknown"):
            remote.publish("orders", 1)
        proxy.clear()
        assert remote.publish("orders", 2) == Receipt("orders", 0, 2)
        assert payloads(c) == [0, 1, 2]
        assert db.execute("SELECT epoch, last_sequence FROM custody.producers").fetchall() == [(1, 0)]
    assert db.execute("SELECT count(*) FROM custody.producers").fetchone() == (0,)


@pytest.mark.req("G11", "C8")
def test_what_comes_late_cannot_overtake_the_next_publish_of_another_thread(c: custody.Custody, proxy: Proxy) -> None:
    """The next publish takes another producer than the one whose answer was lost: that has to be fenced too."""
    c.create_topic("orders")
    with custody.connect(proxy.url, retry_for=0) as remote, ThreadPoolExecutor(1) as thread:
        held = proxy.hold("POST /messages")
        other = thread.submit(remote.publish, "orders", "b")
        wait_for(lambda: proxy.waiting == 0, "b is on its way")
        proxy.lose("POST /messages", "late")
        with pytest.raises(DatabaseUnavailable, match="unknown"):
            remote.publish("orders", "a")
        held.set()
        other.result(20)
        remote.publish("orders", "c")
        assert (proxy.deliver(), payloads(c)) == ([404], ["b", "c"])


@pytest.mark.req("G11", "C8")
def test_what_comes_late_does_not_arrive_after_the_client_was_closed(
    c: custody.Custody, proxy: Proxy, db: psycopg.Connection
) -> None:
    c.create_topic("orders")
    with custody.connect(proxy.url, retry_for=0) as remote:
        proxy.lose("POST /messages", "late")
        with pytest.raises(DatabaseUnavailable, match="unknown"):
            remote.publish("orders", "a")
    assert (proxy.deliver(), payloads(c)) == ([404], [])
    assert db.execute("SELECT count(*) FROM custody.producers").fetchone() == (0,)


def test_a_publish_is_not_sent_while_an_earlier_one_cannot_be_fenced(c: custody.Custody, proxy: Proxy) -> None:
    c.create_topic("orders")
    with custody.connect(proxy.url, retry_for=0) as remote:
        proxy.lose("POST /messages", "late")
        with pytest.raises(DatabaseUnavailable, match="unknown"):
            remote.publish("orders", "a")
        proxy.lose("DELETE /producers", "before")
        with pytest.raises(DatabaseUnavailable):
            remote.publish("orders", "b")
        assert proxy.count("POST /messages") == 1
        remote.publish("orders", "c")
        assert (proxy.deliver(), payloads(c)) == ([404], ["c"])


def test_what_never_arrived_is_not_called_unknown(c: custody.Custody, proxy: Proxy) -> None:
    c.create_topic("orders")
    with custody.connect(proxy.url, retry_for="100ms") as remote:
        proxy.answer("POST /messages", 503, STOPPING, times=1000)
        with pytest.raises(custody.CustodyError) as refused:
            remote.publish("orders", 1)
        proxy.clear()
    assert (refused.value.code, "unknown" in str(refused.value)) == ("stopping", False)


def test_a_refusal_after_a_lost_request_leaves_it_open(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy
) -> None:
    """The first attempt may still be on its way: whoever published again would have two."""
    c.create_topic("orders")
    proxy.lose("POST /messages", "before", then=lambda: c.delete_topic("orders"))
    with pytest.raises(DatabaseUnavailable, match="topic_not_found"):
        remote.publish("orders", 1)


@pytest.mark.req("G11")
def test_a_producer_of_the_callers_sees_its_duplicate(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy
) -> None:
    c.create_topic("orders")
    proxy.lose("POST /producers/init", "after")
    producer = remote.init_producer("p")
    assert producer.epoch == 2  # taken over twice
    proxy.lose("POST /messages", "after")
    assert producer.publish("orders", 1) == Receipt("orders", 0, 0, True)
    assert payloads(c) == [1]


@pytest.mark.req("G12")
def test_a_transaction_is_committed_once(c: custody.Custody, remote: custody.Custody, proxy: Proxy) -> None:
    c.create_topic("orders")
    producer = remote.init_producer("p")
    proxy.lose("POST /transactions/begin", "after")
    transaction = producer.transaction()
    transaction.publish_many("orders", [1, 2])
    proxy.lose("POST /messages", "after")
    proxy.lose("POST /transactions/commit", "after")
    assert transaction.commit() == [Receipt("orders", 0, 0), Receipt("orders", 0, 1)]
    assert (proxy.waiting, payloads(c)) == (0, [1, 2])


def test_a_forgotten_producer_is_initialised_again(
    c: custody.Custody, remote: custody.Custody, db: psycopg.Connection
) -> None:
    c.create_topic("orders")
    remote.publish("orders", 1)
    db.execute("DELETE FROM custody.producers")
    assert remote.publish("orders", 2) == Receipt("orders", 0, 1)


def test_threads_publish_side_by_side_under_producers_of_their_own(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, db: psycopg.Connection
) -> None:
    c.create_topic("orders", partitions=4)
    for _ in range(10):
        proxy.lose("POST /messages", "after")
    with ThreadPoolExecutor(8) as threads:
        receipts = list(threads.map(lambda n: remote.publish("orders", n, key=str(n)), range(200)))
    found = sorted(m.payload for partition in range(4) for m in c.read("orders", partition, max_messages=999))
    assert found == list(range(200))
    assert len({(one.partition, one.offset) for one in receipts}) == 200
    producers = db.execute("SELECT count(*), sum(last_sequence + 1) FROM custody.producers").fetchone()
    assert producers is not None
    assert 1 <= producers[0] <= 8
    assert producers[1] == 200


def test_topics_and_groups_that_were_made_are_recognised(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy
) -> None:
    kept = custody.Retention(time="1h")
    proxy.lose("POST /topics", "after")
    assert remote.create_topic("orders", partitions=2, retention=kept) == c.topic("orders")
    proxy.lose("POST /topics", "after", then=lambda: None)
    policy = custody.Policy(max_attempts=7)
    assert remote.create_group("orders", "g", policy, bindings=["a.*"]) == c.group("orders", "g")
    assert proxy.waiting == 0
    proxy.lose("POST /topics", "before")
    with pytest.raises(custody.CustodyError) as refused:
        remote.create_topic("orders", partitions=3)
    assert refused.value.code == "topic_exists"
    proxy.lose("POST /topics", "before")
    with pytest.raises(custody.CustodyError) as refused:
        remote.create_group("orders", "g", custody.Policy(max_attempts=8), bindings=["a.*"])
    assert refused.value.code == "group_exists"


def test_a_delete_never_meets_what_was_made_since(c: custody.Custody, remote: custody.Custody, proxy: Proxy) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    proxy.lose("DELETE /topics/orders/groups/g", "after", then=lambda: c.create_group("orders", "g"))
    with pytest.raises(DatabaseUnavailable, match="unknown"):
        remote.delete_group("orders", "g")
    assert c.group("orders", "g").name == "g"
    proxy.lose("DELETE /topics/orders", "after", then=lambda: c.create_topic("orders"))
    with pytest.raises(DatabaseUnavailable, match="unknown"):
        remote.delete_topic("orders")
    assert c.topic("orders").name == "orders"
    remote.delete_topic("orders")
    with pytest.raises(TopicNotFound):
        remote.delete_topic("orders")
    assert proxy.waiting == 0


def test_what_cannot_be_repeated_is_sent_once(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, orders: Callable[[int], None]
) -> None:
    orders(2)
    c.claim("orders", "stock", max_messages=2).nack(requeue=False)
    redrive = "POST /topics/orders/groups/stock/redrive"
    proxy.lose(redrive, "after")
    with pytest.raises(DatabaseUnavailable, match="unknown"):
        remote.redrive("orders", "stock")
    assert proxy.count(redrive) == 1
    assert c.dead("orders", "stock") == []
    proxy.answer(redrive, 503, STOPPING)  # this one was not begun
    assert remote.redrive("orders", "stock") == []
    assert proxy.count(redrive) == 3


def test_a_commit_of_a_bare_group_is_sent_once(c: custody.Custody, remote: custody.Custody, proxy: Proxy) -> None:
    c.create_topic("orders")
    c.create_group("orders", "bare", bare=True)
    c.publish_many("orders", range(5))
    commit = "POST /topics/orders/groups/bare/commit"
    proxy.lose(commit, "after")
    with pytest.raises(DatabaseUnavailable, match="unknown"):
        remote.commit("orders", "bare", 0, 2)
    assert proxy.count(commit) == 1
    remote.commit("orders", "bare", 0, 4)
    assert [message.offset for message in remote.fetch("orders", "bare")] == [4]


def test_a_batch_is_one_message_after_another(c: custody.Custody, remote: custody.Custody, proxy: Proxy) -> None:
    c.create_topic("orders")
    proxy.lose("POST /messages", "after")
    batch = [Outgoing(n, key="k", headers={"n": str(n)}) for n in range(500)]
    assert [one.offset for one in remote.publish_many("orders", batch)] == list(range(500))
    assert c.topic("orders").message_count == 500
