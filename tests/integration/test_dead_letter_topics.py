"""Dead-letter topics: the copy that a death leaves behind, what it says, and what nobody can do to it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import everything

import custody
from custody import Constant, Custody, Message, Outgoing, Policy
from custody.model.outcomes import Outcome

pytestmark = [pytest.mark.core, pytest.mark.req("G10")]

TOPIC, DLQ, GROUP = "orders", "orders-dlq", "stock"
PREFIX = "x-custody-"


def policy(**more: object) -> Policy:
    return Policy(**{"max_attempts": 1, "backoff": Constant("0s"), "dead_letter": "topic", **more})  # type: ignore[arg-type]


def start(c: Custody, messages: list[Outgoing], *, partitions: int = 1, **more: object) -> None:
    c.create_topic(TOPIC, partitions=partitions)
    c.create_group(TOPIC, GROUP, policy(**more))
    c.publish_many(TOPIC, messages)


def copies(c: Custody, topic: str = DLQ) -> list[Message]:
    return [message for p in range(c.topic(topic).partitions) for message in c.read(topic, p, max_messages=10_000)]


def original(message: Message) -> tuple[str, int, int]:
    """Where a copy says that it comes from."""
    topic, partition, offset = (
        message.headers[f"{PREFIX}original-{part}"] for part in ("topic", "partition", "offset")
    )
    return topic, int(partition), int(offset)


def reasons(c: Custody) -> list[str]:
    return [message.headers[f"{PREFIX}dlq-reason"] for message in copies(c)]


# what a copy says


def test_a_dead_message_is_copied_with_everything_about_its_death(c: Custody, clock: Clock) -> None:
    start(c, [Outgoing({"n": 1}), Outgoing({"n": 2}, key="k", headers={"trace": "7"})], max_attempts=2)
    c.claim(TOPIC, GROUP).ack()
    began = clock()
    c.claim(TOPIC, GROUP).nack(error="first")
    clock.move(3)
    assert copies(c) == []
    c.claim(TOPIC, GROUP).nack(error='second "with" quotes')
    (copy,) = copies(c)
    assert (copy.key, copy.payload, copy.published_at) == ("k", {"n": 2}, clock())
    assert json.loads(copy.headers.pop(f"{PREFIX}failure-errors")) == [
        "attempt 1: first",
        'attempt 2: second "with" quotes',
    ]
    assert datetime.fromisoformat(copy.headers.pop(f"{PREFIX}first-failure")) == began
    assert datetime.fromisoformat(copy.headers.pop(f"{PREFIX}last-failure")) == began + timedelta(seconds=3)
    assert copy.headers == {
        "trace": "7",
        "x-custody-dlq-reason": "max_retries_exceeded",
        "x-custody-original-topic": TOPIC,
        "x-custody-original-partition": "0",
        "x-custody-original-offset": "1",
        "x-custody-consumer-group": GROUP,
        "x-custody-delivery-attempts": "2",
    }
    assert [letter.offset for letter in c.dead(TOPIC, GROUP)] == [1], "it is still a dead letter of its group"


@pytest.mark.req("G6")
def test_each_way_to_die_has_its_reason(c: Custody, clock: Clock) -> None:
    start(c, [Outgoing(n) for n in range(4)])
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.nack(lease.messages[0], error="no")
    lease.nack(lease.messages[1], error="no", requeue=False)
    c.settle(lease.lease_id, {2: Outcome("dead", error="hopeless")})
    c.claim(TOPIC, GROUP)
    clock.move(31)
    assert c.claim(TOPIC, GROUP).reason == "empty"  # folds the lone message, which dies of it
    assert reasons(c) == ["max_retries_exceeded", "rejected", "terminal", "lease_expired"]
    assert json.loads(copies(c)[3].headers[f"{PREFIX}failure-errors"]) == ["attempt 1: lease expired"]


@pytest.mark.parametrize("payload", [b"\x00\xff", "text\0with NUL", {"a": [1, None]}, None])
def test_the_payload_is_copied_as_it_is(c: Custody, payload: object) -> None:
    start(c, [Outgoing(payload)])
    c.claim(TOPIC, GROUP).nack(error=None)
    (copy,) = copies(c)
    assert copy.payload == payload
    assert json.loads(copy.headers[f"{PREFIX}failure-errors"]) == ["attempt 1: no error given"]


def test_long_errors_do_not_make_long_headers(c: Custody) -> None:
    start(c, [Outgoing(1)], max_attempts=60)
    for _ in range(60):
        c.claim(TOPIC, GROUP).nack(error="é" * 9000)
    (copy,) = copies(c)
    errors = json.loads(copy.headers[f"{PREFIX}failure-errors"])
    assert [error[:12] for error in errors][::49] == ["attempt 11: ", "attempt 60: "]
    assert {len(error) for error in errors} == {300}
    assert copy.headers[f"{PREFIX}delivery-attempts"] == "60"
    assert len(c.dead(TOPIC, GROUP)[0].errors[0]) > 8000, "the case keeps them"


def test_a_message_that_is_done_leaves_no_copy_and_keep_leaves_none(c: Custody) -> None:
    start(c, [Outgoing(1), Outgoing(2)])
    c.create_group(TOPIC, "quiet", Policy(max_attempts=1))
    c.claim(TOPIC, GROUP, max_messages=2).ack()
    c.claim(TOPIC, "quiet", max_messages=2).nack()
    assert copies(c) == []


def test_two_groups_leave_a_copy_each(c: Custody) -> None:
    start(c, [Outgoing(1)])
    c.create_group(TOPIC, "other", policy())
    for group in (GROUP, "other"):
        c.claim(TOPIC, group).nack()
    assert [copy.headers[f"{PREFIX}consumer-group"] for copy in copies(c)] == [GROUP, "other"]


@pytest.mark.req("V8")
def test_redriven_and_dead_again_is_a_second_copy(c: Custody) -> None:
    start(c, [Outgoing(1)])
    c.claim(TOPIC, GROUP).nack(error="one")
    c.redrive(TOPIC, GROUP)
    c.claim(TOPIC, GROUP).nack(error="two")
    assert [json.loads(copy.headers[f"{PREFIX}failure-errors"]) for copy in copies(c)] == [
        ["attempt 1: one"],
        ["attempt 1: two"],
    ]
    c.rewind(TOPIC, GROUP, to_offset=0)
    c.claim(TOPIC, GROUP).nack(error="three")
    assert [original(copy) for copy in copies(c)] == [(TOPIC, 0, 0)] * 3


# where it goes


def test_a_copy_lies_where_its_key_belongs_and_else_as_its_source_lies(c: Custody) -> None:
    messages = [Outgoing(n, key=f"k{n % 7}") for n in range(40)]
    messages += [Outgoing(n, partition=n % 4) for n in range(8)]
    start(c, messages, partitions=4)
    assert c.topic(DLQ).partitions == 4
    while lease := c.claim(TOPIC, GROUP, max_messages=100):
        lease.nack()
    assert c.topic(DLQ).message_count == 48
    for copy in copies(c):
        assert copy.partition == original(copy)[1]
    for partition in range(4):
        found = [original(copy)[2] for copy in copies(c) if copy.partition == partition]
        assert found == sorted(found), "as they died"
        assert c.topic(DLQ).tails[partition] == len(found), "dense"


def test_a_dead_letter_topic_of_other_size_keeps_keys_together(c: Custody) -> None:
    c.create_topic(DLQ, partitions=3)
    start(c, [Outgoing(n, key=f"k{n % 7}") for n in range(40)], partitions=4)
    while lease := c.claim(TOPIC, GROUP, max_messages=100):
        lease.nack()
    where = {(copy.key, copy.partition) for copy in copies(c)}
    assert len(where) == 7
    for key in {key for key, _ in where}:
        numbers = [copy.payload for copy in copies(c) if copy.key == key]
        assert numbers == sorted(numbers)


def test_copies_go_into_the_open_segment_and_time_never_goes_back(
    c: Custody, db: psycopg.Connection, clock: Clock
) -> None:
    start(c, [Outgoing(n) for n in range(3)])
    c.claim(TOPIC, GROUP).nack()
    later = clock()
    db.execute("SELECT custody.seal_segment(%s)", [DLQ])
    clock.move(-10)
    c.claim(TOPIC, GROUP).nack()
    db.execute("SELECT custody.seal_segment(%s)", [TOPIC])  # the next one comes from a sealed segment
    c.claim(TOPIC, GROUP).nack()
    assert [(copy.offset, copy.published_at) for copy in copies(c)] == [(0, later), (1, later), (2, later)]


def test_max_depth_never_refuses_a_copy(c: Custody) -> None:
    c.create_topic(DLQ, max_depth=1)
    c.create_group(DLQ, "watch")
    start(c, [Outgoing(n) for n in range(5)])
    c.claim(TOPIC, GROUP, max_messages=5).nack()
    assert c.topic(DLQ).message_count == 5
    with pytest.raises(custody.errors.QueueFull):
        c.publish(DLQ, "by hand")


# the same transaction


@pytest.mark.req("G21")
def test_a_rollback_leaves_neither_the_death_nor_the_copy(c: Custody, database_url: str) -> None:
    start(c, [Outgoing(1)])
    lease = c.claim(TOPIC, GROUP)
    with psycopg.connect(database_url) as mine:
        lease.nack(lease.messages[0], connection=mine)
        assert mine.execute("SELECT count(*) FROM custody.events WHERE topic = %s", [DLQ]).fetchone() == (1,)
        assert copies(c) == []
        mine.rollback()
    assert (copies(c), c.dead(TOPIC, GROUP), c.stats(TOPIC, GROUP).in_flight) == ([], [], 1)
    with psycopg.connect(database_url) as mine:
        lease.nack(lease.messages[0], connection=mine)
    assert (len(copies(c)), len(c.dead(TOPIC, GROUP))) == (1, 1)


def test_a_refused_settle_leaves_no_copy(c: Custody, db: psycopg.Connection) -> None:
    start(c, [Outgoing(n, key="k") for n in range(2)], ordering="key")
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    before = everything(db)
    with pytest.raises(custody.errors.OrderConflict):
        lease.nack(lease.messages[1], requeue=False)
    assert everything(db) == before


def test_a_skip_that_finds_an_expired_message_dead_copies_it(c: Custody, clock: Clock) -> None:
    """The fold comes first: one message dies, and another, or the same one, is skipped."""
    start(c, [Outgoing(n) for n in range(3)])
    c.claim(TOPIC, GROUP)
    lease = c.claim(TOPIC, GROUP)
    clock.move(31)
    c.skip(TOPIC, GROUP, 0, 1)
    assert [original(copy)[2] for copy in copies(c)] == [0, 1]
    assert [letter.offset for letter in c.dead(TOPIC, GROUP)] == [0]
    assert lease.messages[0].offset == 1


def test_one_claim_that_finds_deaths_on_every_partition_copies_them_all(c: Custody, clock: Clock) -> None:
    start(c, [Outgoing(n, partition=n) for n in range(4)], partitions=4)
    for partition in range(4):
        assert c.claim(TOPIC, GROUP, partition=partition)
    clock.move(31)
    assert not c.claim(TOPIC, GROUP)
    assert {original(copy) for copy in copies(c)} == {(TOPIC, n, 0) for n in range(4)}
    assert reasons(c) == ["lease_expired"] * 4


def test_the_circuit_breaker_opens_and_the_death_is_copied(c: Custody) -> None:
    start(c, [Outgoing(n) for n in range(3)], breaker=custody.Breaker(min_outcomes=2))
    c.claim(TOPIC, GROUP, max_messages=2).nack(error="down")
    assert c.stats(TOPIC, GROUP).breaker == "open"
    assert len(copies(c)) == 2


# it is a topic like any other


def test_copies_are_listed_counted_and_consumed(c: Custody) -> None:
    start(c, [Outgoing({"n": n}, key="k") for n in range(3)])
    c.claim(TOPIC, GROUP, max_messages=3).nack(error="no")
    assert c.topic(DLQ).message_count == 3
    c.create_group(DLQ, "repair", Policy(ordering="key", max_attempts=1))
    assert c.stats(DLQ, "repair").lag == 3
    lease = c.claim(DLQ, "repair", max_messages=3)
    assert [(message.key, message.payload) for message in lease] == [("k", {"n": n}) for n in range(3)]
    lease.ack(lease.messages[0])
    lease.nack(lease.messages[1], error="worse")
    assert [letter.last_error for letter in c.dead(DLQ, "repair")] == ["worse"]
    assert [topic.name for topic in c.topics()] == [TOPIC, DLQ]
