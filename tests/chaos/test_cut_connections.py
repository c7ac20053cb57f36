"""Connections cut before the server has the request, and after it answered: all of a call takes effect, or nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from tests.chaos.proxy import Proxy, When
from tests.conftest import Clock
from tests.waiting import wait_for

import custody
from custody.errors import DatabaseUnavailable
from custody.model.entities import Settled
from custody.verbs import log

pytestmark = pytest.mark.core

TOPIC = "orders"
GROUP = "stock"
WHEN: tuple[When, When] = ("before", "after")
LARGE = "x" * 1000
"""What makes many messages be written by COPY."""


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    with closing(Proxy(database_url)) as opened:
        yield opened


@pytest.fixture
def far(proxy: Proxy, clock: Clock) -> Iterator[custody.Custody]:
    """Custody through the proxy, on one connection."""
    with custody.connect(proxy.url, worker="far", pool_size=1, clock=clock) as opened:
        yield opened


@pytest.fixture(autouse=True)
def topic(c: custody.Custody) -> None:
    """`c` is near: what it reads is what is there."""
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, custody.Policy(ordering="key"))


def payloads(c: custody.Custody) -> list[object]:
    messages = c.read(TOPIC, max_messages=1000)
    assert [message.offset for message in messages] == list(range(len(messages)))
    return [message.payload for message in messages]


@pytest.mark.parametrize("copied", [False, True], ids=["call", "copy"])
def test_a_cut_publish_is_there_as_a_whole_or_not_at_all(
    c: custody.Custody, proxy: Proxy, clock: Clock, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every request of a publish, before and after it: no cut ever leaves a part, nor a hole in the offsets."""
    size = 10 if copied else 100
    if copied:
        monkeypatch.setattr(log, "COPY_FROM", size)
    outcomes = {"committed": 0, "rejected": 0}
    for request in range(20):
        for when in WHEN:
            with custody.connect(proxy.url, pool_size=1, clock=clock) as far:
                far.publish(TOPIC, "first")
                there = payloads(c)
                batch = [f"{request} {when} {n}{LARGE if copied else ''}" for n in range(size)]
                proxy.cut(request, when)
                try:
                    far.publish_many(TOPIC, map(custody.Outgoing, batch))
                except DatabaseUnavailable:
                    # the caller cannot know; a server that has lost its client in the middle rolls back
                    wait_for(lambda: idle(c), "the cut session still runs")
                    added = payloads(c)[len(there) :]
                    assert added in ([], batch)
                    outcomes["committed" if added else "rejected"] += 1
                else:
                    assert payloads(c) == [*there, *batch]
        if proxy.disarm():
            break
    assert request == (5 if copied else 1)
    # only if the answer to the last request, the commit, is lost, has it taken effect
    assert outcomes == {"committed": 1, "rejected": 2 * request - 1}


def idle(c: custody.Custody) -> bool:
    """Whether no session but our own has a transaction open."""
    with c._db.connection() as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND xact_start IS NOT NULL"
        ).fetchone()
    return row is not None and row[0] == 0


@pytest.mark.req("G11", "C8")
@pytest.mark.parametrize("when", WHEN)
def test_an_idempotent_producer_repeats_to_exactly_one_message(
    far: custody.Custody, c: custody.Custody, proxy: Proxy, when: When
) -> None:
    producer = far.init_producer("p")
    assert producer.publish(TOPIC, "one").offset == 0
    proxy.cut(0, when)
    with pytest.raises(DatabaseUnavailable):
        producer.publish_many(TOPIC, [custody.Outgoing("two"), custody.Outgoing("three")])
    # what the producer can ask: where it stands
    state = c.producer("p")
    assert state.last_sequence == (0 if when == "before" else 2)
    receipts = producer.repeat()
    assert [receipt.offset for receipt in receipts] == [1, 2]
    assert {receipt.duplicate for receipt in receipts} == {when == "after"}
    assert producer.repeat() == []
    assert producer.publish(TOPIC, "four").offset == 3
    assert payloads(c) == ["one", "two", "three", "four"]


@pytest.mark.req("G11")
def test_the_next_publish_repeats_an_unknown_one_first(far: custody.Custody, c: custody.Custody, proxy: Proxy) -> None:
    producer = far.init_producer("p")
    for n, when in enumerate(WHEN * 2):
        proxy.cut(0, when)
        with pytest.raises(DatabaseUnavailable):
            producer.publish(TOPIC, 2 * n)
        assert producer.publish(TOPIC, 2 * n + 1).offset == 2 * n + 1
    assert payloads(c) == list(range(8))


@pytest.mark.req("C3", "V5")
@pytest.mark.parametrize("when", WHEN)
def test_a_cut_claim_costs_at_most_the_visibility_timeout(
    far: custody.Custody, c: custody.Custody, proxy: Proxy, clock: Clock, when: When
) -> None:
    c.publish_many(TOPIC, [custody.Outgoing(n, key="K") for n in range(3)])
    proxy.cut(0, when)
    with pytest.raises(DatabaseUnavailable):
        far.claim(TOPIC, GROUP, max_messages=3, visibility_timeout="5s")
    assert c.stats(TOPIC, GROUP).in_flight == (0 if when == "before" else 3)
    clock.move(5)
    attempts = []
    while lease := far.claim(TOPIC, GROUP, max_messages=3):
        attempts += [message.attempt for message in lease]
        lease.ack()
    assert attempts == ([1, 1, 1] if when == "before" else [2, 2, 2])


@pytest.mark.req("G14", "N2")
@pytest.mark.parametrize("when", WHEN)
def test_a_cut_ack_can_be_said_again(far: custody.Custody, c: custody.Custody, proxy: Proxy, when: When) -> None:
    """Before: the second one counts. After: it had counted, and the second one says so."""
    c.publish_many(TOPIC, [custody.Outgoing(n, key="K") for n in range(3)])
    lease = far.claim(TOPIC, GROUP, max_messages=3)
    proxy.cut(0, when)
    with pytest.raises(DatabaseUnavailable):
        lease.ack()
    assert lease.ack() == Settled(settled=3, already=when == "after")
    stats = c.stats(TOPIC, GROUP)
    assert (stats.depth, stats.dead) == (0, 0)
    kinds = [entry.kind for entry in c.trace(TOPIC, 0, 0)]
    assert kinds == ["claim", "ack"]


@pytest.mark.parametrize("when", WHEN)
def test_a_cut_nack_charges_once(
    far: custody.Custody, c: custody.Custody, proxy: Proxy, clock: Clock, when: When
) -> None:
    c.publish(TOPIC, 0, key="K")
    lease = far.claim(TOPIC, GROUP)
    proxy.cut(0, when)
    with pytest.raises(DatabaseUnavailable):
        far.nack(lease.lease_id, [0], error="boom")
    assert far.nack(lease.lease_id, [0], error="boom") == Settled(settled=1, already=when == "after")
    clock.move(60)
    again = far.claim(TOPIC, GROUP)
    assert [message.attempt for message in again] == [2]
    far.nack(again.lease_id, [0], error="boom")
    clock.move(60)
    assert [message.attempt for message in far.claim(TOPIC, GROUP)] == [3]
