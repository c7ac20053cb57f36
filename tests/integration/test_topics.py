"""Topics: creating, describing, deleting, and what is refused."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import everything

import custody
from custody import Custody, Outgoing
from custody.errors import GroupNotFound, InvalidArgument, TopicExists, TopicNotFound

pytestmark = pytest.mark.core


@pytest.mark.req("G2")
def test_a_new_topic_is_empty_and_described(c: Custody, clock: Clock) -> None:
    topic = c.create_topic("orders", partitions=3, max_depth=10)
    assert (topic.name, topic.partitions, topic.max_depth, topic.created_at) == ("orders", 3, 10, clock.time)
    assert topic.tails == topic.first_offsets == (0, 0, 0)
    assert topic.message_count == 0
    assert c.topic("orders") == topic


@pytest.mark.req("G2")
def test_topics_are_listed_by_name_with_their_counts(c: Custody) -> None:
    for name in ("b", "a", "c"):
        c.create_topic(name, partitions=2)
    c.publish_many("b", [Outgoing(n) for n in range(5)])
    assert [(topic.name, topic.message_count) for topic in c.topics()] == [("a", 0), ("b", 5), ("c", 0)]


@pytest.mark.req("G2")
def test_a_name_is_taken_once(c: Custody) -> None:
    c.create_topic("orders")
    with pytest.raises(TopicExists, match="'orders' exists already"):
        c.create_topic("orders", partitions=2)
    assert c.topic("orders").partitions == 1


def test_an_impossible_name_is_refused(c: Custody, db: psycopg.Connection) -> None:
    before = everything(db)
    for name in ("", " ", "a b", "-a", ".a", "a/b", "ü", "a" * 201, "a\n", "a\0"):
        with pytest.raises(InvalidArgument):
            c.create_topic(name)
    assert everything(db) == before


def test_impossible_settings_are_refused(c: Custody) -> None:
    impossible: list[dict[str, Any]] = [{"partitions": 0}, {"partitions": 4097}, {"max_depth": 0}, {"partitions": None}]
    for settings in impossible:
        with pytest.raises(InvalidArgument):
            c.create_topic("orders", **settings)
    assert c.topics() == []


def test_the_longest_name_and_odd_characters_work(c: Custody) -> None:
    for name in ("a" * 200, "0", "_x", "A.b-c_d"):
        c.create_topic(name)
        c.publish(name, 1)
        assert c.read(name)[0].payload == 1


@pytest.mark.req("G2")
def test_a_deleted_topic_is_gone_with_its_groups_and_messages(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("kept")
    before = everything(db)
    c.create_topic("orders", partitions=2)
    c.create_group("orders", "stock")
    producer = c.init_producer("p")
    producer.publish("orders", 1)
    lease = c.claim("orders", "stock")
    lease.nack(requeue=False)
    c.delete_topic("orders")
    after = everything(db)
    for table in before:
        if table not in ("journal", "producers"):
            assert after[table] == before[table], table
    with pytest.raises(TopicNotFound):
        c.topic("orders")
    with pytest.raises(TopicNotFound):
        c.publish("orders", 1)
    with pytest.raises(TopicNotFound):
        c.claim("orders", "stock")
    assert c.producer("p").last_sequence == 0


def test_a_topic_made_anew_starts_from_nothing(c: Custody) -> None:
    c.create_topic("orders", partitions=4)
    c.publish_many("orders", [Outgoing(n, key=str(n)) for n in range(20)])
    c.delete_topic("orders")
    c.create_topic("orders", partitions=2)
    assert c.publish("orders", 1, key="a").offset == 0
    with pytest.raises(GroupNotFound):
        c.claim("orders", "stock")


def test_a_publisher_notices_a_topic_remade_with_other_partitions(c: Custody, database_url: str) -> None:
    c.create_topic("orders", partitions=4)
    c.publish("orders", 1, key="k")
    with custody.connect(database_url) as other:
        other.delete_topic("orders")
        other.create_topic("orders", partitions=1)
    assert c.publish("orders", 1, key="k").partition == 0
    assert c.publish_many("orders", [Outgoing(n, key=str(n)) for n in range(100)])[99].partition == 0


def test_deleting_what_is_not_there_says_so(c: Custody) -> None:
    with pytest.raises(TopicNotFound, match="there is no topic 'nope'"):
        c.delete_topic("nope")


def test_only_an_open_segment_has_its_function(c: Custody, db: psycopg.Connection) -> None:
    def functions() -> list[str]:
        named = "SELECT proname FROM pg_proc WHERE proname LIKE 'append\\_%' ORDER BY proname"
        return [str(name) for (name,) in db.execute(named).fetchall()]

    c.create_topic("orders")
    (first,) = functions()
    c.publish("orders", 1)
    db.execute("SELECT custody.seal_segment('orders')")
    (second,) = functions()
    assert first != second
    assert c.publish("orders", 2).offset == 1
    c.delete_topic("orders")
    assert functions() == []
