"""Replay: a copy in a dead-letter topic is published once more, and its dead message is done."""

from __future__ import annotations

import threading

import psycopg
import pytest
from tests.integration.stream import everything, offsets

from custody import Constant, Custody, Message, Outgoing, Policy
from custody.errors import InvalidArgument, OffsetOutOfRange, PartitionNotFound, QueueFull, TopicNotFound
from custody.model.entities import Replayed

pytestmark = [pytest.mark.core, pytest.mark.req("G10")]

TOPIC, DLQ, GROUP = "orders", "orders-dlq", "stock"
POLICY = Policy(ordering="key", max_attempts=1, backoff=Constant("0s"), dead_letter="topic")
HOLD = Policy(ordering="key", max_attempts=1, backoff=Constant("0s"), dead_letter="topic", on_dead="hold")


def start(c: Custody, *messages: Outgoing, policy: Policy = POLICY, partitions: int = 1, dead: int = 1) -> None:
    """The first messages die, one after the other."""
    c.create_topic(TOPIC, partitions=partitions)
    c.create_group(TOPIC, GROUP, policy)
    c.publish_many(TOPIC, messages)
    for _ in range(dead):
        c.claim(TOPIC, GROUP).nack(error="no")


def last(c: Custody, topic: str = TOPIC, partition: int = 0) -> Message:
    return c.read(topic, partition, max_messages=1000)[-1]


def kinds(c: Custody, offset: int = 0) -> list[str]:
    return [entry.kind for entry in c.trace(TOPIC, 0, offset)]


@pytest.mark.parametrize("headers", [None, {"trace": "7"}])
@pytest.mark.parametrize("payload", [b"\x00\xff", "text", {"a": [1, None]}])
def test_it_comes_back_as_the_message_that_it_was(c: Custody, payload: object, headers: dict[str, str] | None) -> None:
    start(c, Outgoing(payload, key="k", headers=headers))
    assert c.replay(DLQ, 0, 0) == Replayed(TOPIC, 0, 1, duplicate=False, resolved=True)
    lease = c.claim(TOPIC, GROUP)
    (again,) = lease
    assert (again.offset, again.key, again.payload, again.attempt) == (1, "k", payload, 1)
    assert again.headers == {**(headers or {}), "x-custody-replayed-from": "orders-dlq/0/0"}
    lease.nack(error="still no")
    copy = last(c, DLQ)
    assert copy.headers["x-custody-original-offset"] == "1"
    assert copy.headers["x-custody-replayed-from"] == "orders-dlq/0/0", "its history is kept"


@pytest.mark.req("V3", "V8")
def test_the_dead_message_is_done_with_who_and_why(c: Custody, db: psycopg.Connection) -> None:
    start(c, Outgoing(1))
    c.replay(DLQ, 0, 0, reason="fixed")
    assert c.dead(TOPIC, GROUP) == []
    entry = c.trace(TOPIC, 0, 0)[-1]
    assert (entry.kind, entry.worker, entry.error) == ("replay", "test", "fixed")
    assert db.execute("SELECT detail FROM custody.history WHERE kind = 'replay'").fetchall() == [
        ({"dead_letter": "orders-dlq/0/0", "replayed_as": "orders/0/1"},)
    ]
    assert offsets(c.claim(TOPIC, GROUP, max_messages=9)) == [1]


def test_a_repeat_publishes_nothing_and_returns_the_first_receipt(c: Custody, db: psycopg.Connection) -> None:
    start(c, Outgoing(1), Outgoing(2), dead=2)
    c.create_topic("elsewhere")
    assert c.replay(DLQ, 0, 1) == Replayed(TOPIC, 0, 2, duplicate=False, resolved=True)
    before = everything(db)
    assert c.replay(DLQ, 0, 1) == Replayed(TOPIC, 0, 2, duplicate=True, resolved=True)
    assert c.replay(DLQ, 0, 1, target_topic="elsewhere").topic == TOPIC, "once, wherever to"
    assert everything(db) == before
    assert c.replay(DLQ, 0, 0) == Replayed(TOPIC, 0, 3, duplicate=False, resolved=True)


def test_a_repeat_is_known_after_the_copy_has_gone(c: Custody, db: psycopg.Connection) -> None:
    start(c, Outgoing(1))
    c.replay(DLQ, 0, 0)
    db.execute("SELECT custody.seal_segment(%s)", [DLQ])
    db.execute("SELECT custody.drop_segments(%s)", [DLQ])
    assert c.topic(DLQ).first_offsets == (1,)
    assert c.replay(DLQ, 0, 0).duplicate


def test_to_another_topic_it_goes_where_its_key_belongs(c: Custody) -> None:
    start(c, *[Outgoing(n, key=f"k{n}") for n in range(10)], Outgoing("none", partition=0), dead=11)
    c.create_topic("repaired", partitions=4)
    c.publish("repaired", "before", partition=0)
    for offset in range(11):
        replayed = c.replay(DLQ, 0, offset, target_topic="repaired")
        copy = c.read(DLQ, 0, offset=offset)[0]
        assert replayed.topic == "repaired"
        probe = c.publish("repaired", None, key=copy.key, partition=None if copy.key else 0)
        assert probe.partition == replayed.partition
    assert c.dead(TOPIC, GROUP) == []


@pytest.mark.req("K8")
def test_a_held_key_goes_on(c: Custody) -> None:
    start(c, Outgoing(1, key="k"), Outgoing(2, key="k"), policy=HOLD)
    assert c.claim(TOPIC, GROUP, max_messages=9).reason in ("busy", "empty")
    assert c.blocked_keys(TOPIC, GROUP)
    c.replay(DLQ, 0, 0)
    assert offsets(c.claim(TOPIC, GROUP, max_messages=9)) == [1, 2]


@pytest.mark.req("V7")
def test_what_was_kept_for_the_dead_letter_goes_with_it(c: Custody, db: psycopg.Connection) -> None:
    start(c, Outgoing(1))
    db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    db.execute("SELECT custody.drop_segments(%s)", [TOPIC])
    assert db.execute("SELECT count(*) FROM custody.kept_events").fetchone() == (1,)
    assert c.replay(DLQ, 0, 0).resolved
    assert db.execute("SELECT count(*) FROM custody.kept_events").fetchone() == (0,)
    assert c.claim(TOPIC, GROUP).messages[0].payload == 1


@pytest.mark.parametrize("verb", ["redrive", "discard"])
def test_if_somebody_was_faster_it_is_published_all_the_same_and_says_so(c: Custody, verb: str) -> None:
    start(c, Outgoing(1))
    getattr(c, verb)(TOPIC, GROUP)
    assert c.replay(DLQ, 0, 0) == Replayed(TOPIC, 0, 1, duplicate=False, resolved=False)
    assert c.replay(DLQ, 0, 0) == Replayed(TOPIC, 0, 1, duplicate=True, resolved=False)
    assert kinds(c)[-1] == verb


def test_a_group_that_is_gone_resolves_nothing(c: Custody) -> None:
    start(c, Outgoing(1))
    c.delete_group(TOPIC, GROUP)
    assert c.replay(DLQ, 0, 0) == Replayed(TOPIC, 0, 1, duplicate=False, resolved=False)


def test_a_copy_of_a_topic_made_anew_leaves_its_messages_alone(c: Custody) -> None:
    start(c, Outgoing("old"))
    c.delete_topic(TOPIC)
    start(c, Outgoing("new"))
    assert c.replay(DLQ, 0, 0) == Replayed(TOPIC, 0, 1, duplicate=False, resolved=False)
    assert [letter.payload for letter in c.dead(TOPIC, GROUP)] == ["new"]
    assert last(c).payload == "old"
    assert c.replay(DLQ, 0, 1).resolved


def test_headers_written_by_hand_make_nothing_done_that_is_not_theirs(c: Custody) -> None:
    start(c, Outgoing("paid"))
    forged = dict(c.read(DLQ, 0)[0].headers)
    c.create_topic("mine-dlq")
    c.publish("mine-dlq", "paid", headers=forged)
    assert not c.replay("mine-dlq", 0, 0).resolved
    c.publish(DLQ, "other", headers=forged)
    assert not c.replay(DLQ, 0, 1).resolved
    assert len(c.dead(TOPIC, GROUP)) == 1


@pytest.mark.parametrize(
    ("headers", "topic", "partition", "offset", "error", "message"),
    [
        (None, DLQ, 0, 7, OffsetOutOfRange, "orders-dlq/0/7 has no message: the partition goes from 0 to 2"),
        (None, DLQ, 0, -1, OffsetOutOfRange, "has no message"),
        (None, DLQ, 3, 0, PartitionNotFound, "no partition 3"),
        (None, "nowhere-dlq", 0, 0, TopicNotFound, "nowhere-dlq"),
        (None, DLQ, 0, 1, InvalidArgument, "orders-dlq/0/1 is not a dead letter"),
        ({"x-custody-original-topic": TOPIC}, DLQ, 0, 1, InvalidArgument, "not a dead letter"),
        (
            {
                "x-custody-original-topic": TOPIC,
                "x-custody-original-partition": "zero",
                "x-custody-original-offset": "0",
            },
            DLQ,
            0,
            1,
            InvalidArgument,
            "not a dead letter",
        ),
        (
            {
                "x-custody-original-topic": "gone",
                "x-custody-original-partition": "0",
                "x-custody-original-offset": "0",
            },
            DLQ,
            0,
            1,
            TopicNotFound,
            "no topic 'gone'",
        ),
    ],
)
def test_what_cannot_be_replayed_changes_nothing(
    c: Custody,
    db: psycopg.Connection,
    headers: dict[str, str] | None,
    topic: str,
    partition: int,
    offset: int,
    error: type[Exception],
    message: str,
) -> None:
    start(c, Outgoing(1))
    c.publish(DLQ, "by hand", headers=headers)
    before = everything(db)
    with pytest.raises(error, match=message):
        c.replay(topic, partition, offset)
    with pytest.raises(TopicNotFound):
        c.replay(DLQ, 0, 0, target_topic="nowhere")
    assert everything(db) == before


def test_a_full_target_refuses_and_the_message_stays_dead(c: Custody, db: psycopg.Connection) -> None:
    start(c, Outgoing(1))
    c.create_topic("small", max_depth=1)
    c.create_group("small", "slow")
    c.publish("small", 1)
    before = everything(db)
    with pytest.raises(QueueFull):
        c.replay(DLQ, 0, 0, target_topic="small")
    assert everything(db) == before
    c.claim("small", "slow").ack()
    assert c.replay(DLQ, 0, 0, target_topic="small").resolved


def test_a_waiting_worker_is_woken(c: Custody) -> None:
    start(c, Outgoing(1))
    woken = threading.Event()
    stop = c.listen(TOPIC, woken.set)
    try:
        assert woken.wait(10)  # when it begins to listen
        woken.clear()
        c.replay(DLQ, 0, 0)
        assert woken.wait(10)
    finally:
        stop()


@pytest.mark.req("G16")
def test_a_replay_goes_back_to_the_lane_of_its_message(c: Custody, db: psycopg.Connection) -> None:
    c.create_topic("jobs", partitions=2, priorities=True)
    c.create_group("jobs", "g", Policy(ordering="key", max_attempts=1, dead_letter="topic"))
    sent = {n: c.publish("jobs", n, key=f"k{n}", priority="high").partition for n in range(8)}
    for _ in range(8):
        c.claim("jobs", "g").nack(error="boom")
    copies = db.execute('SELECT partition, "offset" FROM custody.events WHERE topic = %s', ["jobs-dlq"]).fetchall()
    assert len(copies) == 8
    for partition, offset in copies:
        replayed = c.replay("jobs-dlq", partition, offset)
        (again,) = c.read("jobs", replayed.partition, offset=replayed.offset)
        assert (again.priority, replayed.partition) == ("high", sent[again.payload])
