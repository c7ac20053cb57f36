"""A key has at most 2,000 bytes, whichever way it comes. The longest goes through the whole lifecycle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody import Constant, Custody, Outgoing, Policy
from custody.errors import InvalidArgument, InvalidPayload
from custody.model.entities import KEY_BYTES
from custody.relay import Relay
from custody.verbs import log

pytestmark = [pytest.mark.core, pytest.mark.req("G3", "G11")]


def key_of(length: int) -> str:
    """What does not become shorter when the database compresses it."""
    return "".join(chr(code) for code in random.Random(1).choices(range(33, 127), k=length))


LONGEST, TOO_LONG = key_of(KEY_BYTES), key_of(KEY_BYTES + 1)


@pytest.mark.parametrize("ordering", ["key", "none"])
def test_the_longest_key_goes_through_the_whole_lifecycle(c: Custody, clock: Clock, ordering: Any) -> None:
    c.create_topic("orders")
    policy = Policy(ordering=ordering, max_attempts=3, backoff=Constant("1s"), dead_letter="topic")
    c.create_group("orders", "billing", policy=policy, start="earliest")
    c.publish_many("orders", [Outgoing(n, key=LONGEST) for n in range(4)])
    c.claim("orders", "billing", max_messages=2).nack(error="it failed")
    clock.move(2)
    assert c.claim("orders", "billing")
    clock.move(60)  # expired
    for _ in range(20):
        clock.move(2)
        if lease := c.claim("orders", "billing"):
            first = lease.messages[0].offset == 0
            lease.nack(error="it failed") if first else lease.ack()
    assert [letter.offset for letter in c.dead("orders", "billing")] == [0]
    assert not c.claim("orders", "billing")


@pytest.mark.parametrize("key", [TOO_LONG, "ü" * (KEY_BYTES // 2 + 1)], ids=["by characters", "by bytes"])
def test_a_longer_one_is_refused_by_python(c: Custody, key: str) -> None:
    c.create_topic("orders")
    ways: list[Callable[[], object]] = [
        lambda: c.publish("orders", 1, key=key),
        lambda: c.publish_many("orders", [Outgoing(n, key=key) for n in range(log.COPY_FROM + 1)]),
        lambda: c.publish_delayed("orders", [Outgoing(1, key=key, delay="1h")]),
    ]
    with psycopg.connect(c.database_url) as mine:
        ways += [
            lambda: custody.outbox.write(mine, event_type="e", payload=1, destination="orders", ordering_key=key),
            lambda: custody.outbox.write(mine, event_type="e", payload=1, destination="orders", partition_key=key),
        ]
        for way in ways:
            with pytest.raises(InvalidPayload, match="at most 2,000 bytes"):
                way()
    with c.init_producer("p").transaction() as tx, pytest.raises(InvalidPayload, match="at most 2,000 bytes"):
        tx.publish("orders", 1, key=key)
    assert list(c.read("orders", 0)) == []


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("SELECT custody.send('orders', '1', p_key => %s)", "key_length"),
        ("SELECT custody.outbox_write('e', '1', 'orders', p_ordering_key => %s)", "at most 2,000 bytes"),
        ("SELECT custody.outbox_write('e', '1', 'orders', p_partition_key => %s)", "at most 2,000 bytes"),
    ],
)
def test_a_longer_one_is_refused_by_the_database(c: Custody, statement: str, error: str) -> None:
    c.create_topic("orders")
    with psycopg.connect(c.database_url) as mine:
        mine.execute(statement.encode(), [LONGEST])
        with pytest.raises(psycopg.Error, match=error):
            mine.execute(statement.encode(), [TOO_LONG])


def test_what_the_database_refuses_has_our_words(c: Custody) -> None:
    c.create_topic("orders")
    with pytest.raises(InvalidPayload, match="at most 2,000 bytes"):
        c._db.call("send", topic="orders", payload="1", key=TOO_LONG)
    with pytest.raises(InvalidArgument, match="index row"):  # a limit of the server: the same again would fail again
        c._db.call("init_producer", producer=key_of(9_000))


@pytest.mark.req("O6")
def test_an_event_that_is_older_than_the_limit_holds_up_no_other(c: Custody) -> None:
    """A relay can settle it. Only the log does not take it."""
    c.create_topic("orders")
    c.create_group("orders", "billing")
    with psycopg.connect(c.database_url) as mine:
        mine.execute("ALTER TABLE custody.outbox DISABLE TRIGGER outbox_begins")
        for destination, key in (("test:", TOO_LONG), ("orders", TOO_LONG), ("orders", "k")):
            mine.execute("SELECT custody.outbox_write('e', '1', %s, p_ordering_key => %s)", [destination, key])
        mine.execute("ALTER TABLE custody.outbox ENABLE TRIGGER outbox_begins")
    seen: list[str | None] = []
    Relay(c.database_url, {"test": lambda event: seen.append(event.key)}, poll="10ms").drain("20s")
    assert seen == [TOO_LONG]
    assert [message.key for message in c.claim("orders", "billing")] == ["k"]
    with custody.outbox.Outbox(c.database_url) as outbox:
        found = [(event.status, event.last_error) for event in outbox.events()]
    assert found == [("PUBLISHED", None), ("DEAD", "a key has at most 2,000 bytes"), ("PUBLISHED", None)]
