"""A topic, or a group, that is deleted and made anew under its name is another one."""

from __future__ import annotations

import threading

import msgspec
import psycopg
import pytest
from tests.conformance.conftest import blocking, refused
from tests.waiting import wait_for

import custody
from custody import Message, Outgoing

pytestmark = pytest.mark.core


def made(c: custody.Custody, **settings: bool) -> custody.Custody:
    """The topic and its groups, with two messages."""
    c.create_topic("orders", **settings)  # type: ignore[arg-type]
    c.create_group("orders", "stock")
    c.create_group("orders", "bare", bare=True)
    c.publish_many("orders", [1, 2])
    return c


def delivered(c: custody.Custody, partition: int = 0) -> list[list[Message]]:
    """The messages, by each of the ways in which a consumer gets them."""
    return [
        c.claim("orders", "stock", max_messages=2, partition=partition).messages,  # type: ignore[list-item]
        c.fetch("orders", "bare", partition),
        c.read("orders", partition),
    ]


@pytest.mark.req("G21")
def test_what_was_processed_of_the_old_topic_is_not_taken_for_the_new_one(
    c: custody.Custody, direct: custody.Custody, database_url: str
) -> None:
    made(c)
    with psycopg.connect(database_url) as mine:
        for message in c.read("orders"):
            assert custody.once(mine, "stock", message)
        for messages in delivered(c):
            assert not any(custody.once(mine, "stock", message) for message in messages)
        direct.delete_topic("orders")
        made(direct)
        for name, messages in zip(("claim", "fetch", "read"), delivered(c), strict=True):
            assert [message.offset for message in messages] == [0, 1]
            assert all(custody.once(mine, name, message) for message in messages), name
            assert not any(custody.once(mine, name, message) for message in messages), name
        assert all(custody.once(mine, "stock", message) for message in c.read("orders"))


@pytest.mark.req("G21")
def test_a_group_that_is_made_anew_has_processed_what_it_had(
    c: custody.Custody, direct: custody.Custody, database_url: str
) -> None:
    made(c)
    with psycopg.connect(database_url) as mine:
        lease = c.claim("orders", "stock", max_messages=2)
        assert all(custody.once(mine, "stock", message) for message in lease)
        direct.delete_group("orders", "stock")
        direct.create_group("orders", "stock")
        again = c.claim("orders", "stock", max_messages=2)
        assert not any(custody.once(mine, "stock", message) for message in again)
        assert custody.forget_once(mine, older_than=0, group="other") == 0
        assert custody.forget_once(mine, older_than=0, group="stock") == 2
        assert all(custody.once(mine, "stock", message) for message in again)


@pytest.mark.req("G21")
def test_a_message_that_says_not_whose_it_is(direct: custody.Custody, database_url: str) -> None:
    (message, _) = made(direct).read("orders")
    unknown = Message(**{**{name: getattr(message, name) for name in message.__struct_fields__}, "topic_uid": None})
    with psycopg.connect(database_url) as mine, refused("invalid_argument") as found:
        custody.once(mine, "stock", unknown)
    assert "topic_uid" in found[0].message


def test_every_message_has_the_uid_and_the_priority_of_its_topic(c: custody.Custody, direct: custody.Custody) -> None:
    made(c)
    for messages in delivered(c):
        assert {(message.topic_uid, message.priority) for message in messages} == {(c.topic("orders").uid, None)}
    direct.delete_topic("orders")
    made(direct, priorities=True)  # the client may remember that the topic had none
    for messages in delivered(c, partition=2):
        assert {(message.topic_uid, message.priority) for message in messages} == {(c.topic("orders").uid, "normal")}
    c.publish("orders", 3, priority="low")
    c.claim("orders", "stock", partition=3).nack(requeue=False)
    (dead,) = c.dead("orders", "stock")
    assert (dead.topic_uid, dead.priority) == (c.topic("orders").uid, "low")


@pytest.mark.req("G14")
@pytest.mark.parametrize("what", ["topic", "group"])
def test_a_lease_of_the_old_one_holds_nothing_of_the_new_one(
    c: custody.Custody, direct: custody.Custody, what: str
) -> None:
    made(c)
    old = c.claim("orders", "stock", max_messages=2)
    if what == "topic":
        direct.delete_topic("orders")
        made(direct)
    else:
        direct.delete_group("orders", "stock")
        direct.create_group("orders", "stock")
    new = c.claim("orders", "stock", max_messages=2)
    with refused("lease_lost"):
        old.ack(old.messages[0])
    with refused("lease_lost"):
        old.ack()
    with refused("lease_lost"):
        old.nack(error="no")
    with refused("lease_lost"):
        old.extend("1h")
    assert c.stats("orders", "stock").in_flight == 2
    new.ack()


@pytest.mark.req("G11")
def test_a_producer_does_not_take_the_new_topic_for_the_one_it_published_to(
    c: custody.Custody, direct: custody.Custody
) -> None:
    made(c)
    epoch = c.init_producer("p").epoch
    again = {"producer_id": "p", "epoch": epoch, "sequence": 0}
    c.publish_many("orders", [Outgoing(3)], **again)  # type: ignore[arg-type]
    assert c.publish_many("orders", [Outgoing(3)], **again)[0].duplicate  # type: ignore[arg-type]
    direct.delete_topic("orders")
    made(direct)
    with refused("sequence_conflict"):
        c.publish_many("orders", [Outgoing(3)], **again)  # type: ignore[arg-type]
    c.publish_many("orders", [Outgoing(4)], producer_id="p", epoch=epoch, sequence=1)
    assert [message.payload for message in c.read("orders")] == [1, 2, 4]


@pytest.mark.req("V5")
@blocking
def test_a_worker_goes_on_with_the_new_topic(c: custody.Custody, direct: custody.Custody) -> None:
    made(c)
    seen: list[tuple[object, object]] = []
    worker = c.worker_for(
        "orders", "stock", lambda message: seen.append((message.topic_uid, message.payload)), poll="50ms"
    )
    old = c.topic("orders").uid
    running = threading.Thread(target=worker.run)
    running.start()
    try:
        wait_for(lambda: {(old, 1), (old, 2)} <= set(seen), "the worker handles the old topic")
        direct.pause("orders", "stock")
        with direct._db.transaction() as connection:  # at one moment: between the two it would be told that it is gone
            direct._db.call("delete_topic", on=connection, topic="orders")
            direct._db.call("create_topic", on=connection, topic="orders")
            policy = msgspec.json.encode(custody.Policy().columns()).decode()
            direct._db.call("create_group", on=connection, topic="orders", group="stock", policy=policy)
        direct.publish_many("orders", [1, 2])
        new = direct.topic("orders").uid
        wait_for(lambda: {(new, 1), (new, 2)} <= set(seen), "the worker handles the new topic")
    finally:
        worker.stop()
        running.join(20)
    assert not running.is_alive()
    assert direct.stats("orders", "stock").depth == 0
