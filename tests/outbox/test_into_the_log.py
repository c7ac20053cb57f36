"""From the caller's own transaction into a topic of the same database: by claims, publishes, workers and relays."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.waiting import wait_for

import custody
from custody.model import placement
from custody.outbox import EventState, Outbox
from custody.relay import Relay

pytestmark = [pytest.mark.core, pytest.mark.req("V10")]


@pytest.fixture
def live(database_url: str) -> Iterator[custody.Custody]:
    with custody.connect(database_url, worker="test") as c:
        c.create_topic("orders")
        c.create_group("orders", "g", custody.Policy(ordering="key"))
        yield c


@pytest.fixture
def mine(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


@pytest.fixture
def outbox(database_url: str) -> Iterator[Outbox]:
    with Outbox(database_url) as opened:
        yield opened


def write(connection: psycopg.Connection[Any], payload: Any, topic: str = "orders", **given: Any) -> None:
    custody.outbox.write(connection, event_type="placed", payload=payload, destination=topic, **given)


def test_a_claim_moves_what_is_committed_first(
    live: custody.Custody, mine: psycopg.Connection[Any], outbox: Outbox
) -> None:
    mine.execute("CREATE TABLE orders (n int)")
    mine.commit()
    mine.execute("INSERT INTO orders VALUES (1)")
    write(mine, {"n": 1}, headers={"a": "b"}, ordering_key="k", partition_key="p")
    assert not live.claim("orders", "g")
    mine.rollback()
    assert not live.claim("orders", "g")
    assert outbox.events() == []
    mine.execute("INSERT INTO orders VALUES (2)")
    write(mine, {"n": 2}, headers={"a": "b"}, ordering_key="k", partition_key="p")
    write(mine, "text", partition_key="p")
    write(mine, b"\0")
    mine.commit()
    lease = live.claim("orders", "g", max_messages=10)
    assert [(m.offset, m.key, m.payload) for m in lease] == [(0, "k", {"n": 2}), (1, "p", "text"), (2, None, b"\0")]
    events = outbox.events()
    assert lease.messages[0].headers == {
        "a": "b",
        "x-custody-event-id": str(events[0].event_id),
        "x-custody-event-type": "placed",
    }
    assert {event.status for event in events} == {EventState.PUBLISHED}
    assert not live.claim("orders", "g"), "they were moved twice"


def test_a_publish_moves_what_is_committed_before_it(live: custody.Custody, mine: psycopg.Connection[Any]) -> None:
    write(mine, "first")
    mine.commit()
    assert live.publish("orders", "second").offset == 1
    write(mine, "third")
    mine.commit()
    assert live.publish_many("orders", list(range(100)))[0].offset == 3
    assert [m.payload for m in live.read("orders")][:3] == ["first", "second", "third"]
    write(mine, "again")
    mine.commit()
    assert live.publish("orders", 1, expected_offset=103).offset == 103  # the end that its caller has seen
    assert live.publish("orders", 1).offset == 105


def test_all_partitions_and_a_group_that_finds_nothing_else(database_url: str, mine: psycopg.Connection[Any]) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("wide", partitions=5)
        c.create_group("wide", "g")
        for n in range(50):
            write(mine, n, "wide", ordering_key=f"key {n}")
        mine.commit()
        got: list[int] = []
        while lease := c.claim("wide", "g", max_messages=7):
            got += [m.payload for m in lease]
            assert all(placement.partition_for(m.key, 5) == m.partition for m in lease)
            lease.ack()
        assert sorted(got) == list(range(50))


def test_a_topic_with_priorities_gets_them_as_normal_ones(database_url: str, mine: psycopg.Connection[Any]) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("lanes", partitions=2, priorities=True)
        c.create_group("lanes", "g")
        for n in range(10):
            write(mine, n, "lanes", ordering_key=f"key {n}")
        mine.commit()
        got: list[int] = []
        while lease := c.claim("lanes", "g", max_messages=4):
            got += [m.payload for m in lease]
            assert {m.partition % 5 for m in lease} == {2}
            lease.ack()
        assert sorted(got) == list(range(10))


def test_a_transaction_that_stays_open_stalls_nobody(
    live: custody.Custody, database_url: str, mine: psycopg.Connection[Any]
) -> None:
    """Not other writers of the topic, not publishes, not claims; and not even the first event of a topic."""
    write(mine, "uncommitted", ordering_key="mine")
    with psycopg.connect(database_url) as other:
        other.execute("SET lock_timeout = '5s'")
        write(other, 1, ordering_key="other")
        write(other, 2)
        other.commit()
    with psycopg.connect(database_url, options="-c lock_timeout=5s") as quick:
        quick.execute("SELECT custody.send('orders', '3')")
    lease = live.claim("orders", "g", max_messages=10)
    assert [m.payload for m in lease] == [1, 2, 3]
    lease.ack()
    live.publish_many("orders", range(4, 104))
    assert len(live.claim("orders", "g", max_messages=1000)) == 100
    mine.commit()
    assert [m.payload for m in live.claim("orders", "g")] == ["uncommitted"]


def test_a_claim_does_not_wait_for_a_partition_that_somebody_publishes_to(
    live: custody.Custody, database_url: str, mine: psycopg.Connection[Any]
) -> None:
    live.publish("orders", "there")
    with psycopg.connect(database_url) as slow:
        slow.execute("SELECT custody.send('orders', '1')")
        write(mine, "moved later")
        mine.commit()
        assert [m.payload for m in live.claim("orders", "g", max_messages=10)] == ["there"]
        slow.commit()
    assert sorted(map(str, (m.payload for m in live.claim("orders", "g", max_messages=10)))) == ["1", "moved later"]


def test_an_event_waits_for_its_time_and_its_key_with_it(
    live: custody.Custody, database_url: str, mine: psycopg.Connection[Any], clock: Clock
) -> None:
    with custody.connect(database_url, clock=clock) as c:
        write(mine, 1, ordering_key="k", available_at=clock() + timedelta(seconds=60))
        write(mine, 2, ordering_key="k")
        write(mine, 3, ordering_key="other")
        mine.commit()
        lease = c.claim("orders", "g", max_messages=10)
        assert [m.payload for m in lease] == [3]
        lease.ack()
        clock.move(61)
        assert [m.payload for m in c.claim("orders", "g", max_messages=10)] == [1, 2]


def test_a_full_topic_leaves_them_in_the_outbox(
    database_url: str, mine: psycopg.Connection[Any], outbox: Outbox
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("small", max_depth=3)
        c.create_group("small", "g")
        for n in range(5):
            write(mine, n, "small")
        mine.commit()
        lease = c.claim("small", "g", max_messages=10)
        assert [m.payload for m in lease] == [0, 1, 2]
        assert not c.claim("small", "g", max_messages=10)
        assert len(outbox.events(states=["PENDING"])) == 2
        lease.ack()
        assert [m.payload for m in c.claim("small", "g", max_messages=10)] == [3, 4]


def test_events_of_a_topic_that_was_deleted_are_dead_and_can_be_replayed(
    live: custody.Custody, database_url: str, mine: psycopg.Connection[Any], outbox: Outbox
) -> None:
    live.create_topic("gone", partitions=2)
    write(mine, 1, "gone", ordering_key="k")
    mine.commit()
    live.delete_topic("gone")
    relay = Relay(live)
    relay.run_once()
    relay.close()
    (event,) = outbox.events()
    assert (event.status, event.last_error) == (EventState.DEAD, "its topic was deleted")
    live.create_topic("gone")
    outbox.replay(ids=[event.event_id])
    live.create_group("gone", "g")
    assert [m.payload for m in live.claim("gone", "g")] == [1]


@pytest.mark.req("O11")
def test_events_of_a_topic_that_is_gone_hold_up_no_replay(
    live: custody.Custody, mine: psycopg.Connection[Any], outbox: Outbox
) -> None:
    live.create_topic("gone")
    write(mine, 1, "gone")
    write(mine, 2, "test:")
    mine.commit()
    first, second = [event.event_id for event in outbox.events()]
    outbox.kill([first, second])
    live.delete_topic("gone")
    assert outbox.replay(dry_run=True) == [second]
    assert outbox.stranded() == [first]
    assert outbox.replay() == [second]
    assert [event.status for event in outbox.events()] == [EventState.DEAD, EventState.PENDING]
    assert (outbox.audit()[0]["action"], outbox.audit()[0]["events"]) == ("replay", 1)


def test_a_bare_group_sees_them(live: custody.Custody, mine: psycopg.Connection[Any]) -> None:
    live.create_group("orders", "bare", bare=True)
    write(mine, 1)
    mine.commit()
    assert [m.payload for m in live.fetch("orders", "bare")] == [1]


def test_a_pass_of_a_pipeline_takes_what_was_committed_before_it_began(
    live: custody.Custody, mine: psycopg.Connection[Any]
) -> None:
    for n in range(3):
        write(mine, n, ordering_key=f"k{n}")
    mine.commit()
    drive, whole = live.drive("orders", "g")
    write(mine, 3)
    mine.commit()
    claim = drive.claim(100, whole)
    assert claim.messages == 3


def test_a_pass_of_a_pipeline_takes_all_of_them(live: custody.Custody, db: psycopg.Connection[Any]) -> None:
    """However many, and behind keys that wait, too."""
    db.execute("SELECT custody.outbox_write('t', '1', 'orders', p_ordering_key => 'a', p_available_at => '2100-01-01')")
    db.execute("SELECT custody.outbox_write('t', '1', 'orders', p_ordering_key => 'a') FROM generate_series(1, 6000)")
    db.execute("SELECT custody.outbox_write('t', '1', 'orders') FROM generate_series(1, 2500)")
    drive, whole = live.drive("orders", "g")
    assert drive.claim(5000, whole).messages == 2500


@pytest.mark.req("O4")
def test_a_worker_and_a_relay_move_them(live: custody.Custody, mine: psycopg.Connection[Any], outbox: Outbox) -> None:
    got: list[Any] = []
    worker = live.worker_for("orders", "g", lambda message: got.append(message.payload), poll="20ms")
    thread = threading.Thread(target=worker.run)
    thread.start()
    write(mine, 1)
    mine.commit()
    wait_for(lambda: got == [1], "the worker has not moved it")
    worker.stop()
    thread.join()
    write(mine, 2)
    mine.commit()
    relay = Relay(live)
    assert relay.run_once() == 1
    relay.close()
    assert [m.payload for m in live.read("orders")] == [1, 2]


@pytest.mark.parametrize("by", ["hint", "relay"])
def test_a_worker_that_waits_is_woken_by_a_hint_after_the_commit_or_by_a_relay(
    live: custody.Custody, mine: psycopg.Connection[Any], db: psycopg.Connection[Any], by: str
) -> None:
    got: list[Any] = []
    worker = live.worker_for("orders", "g", lambda message: got.append(message.payload), poll="1h")
    thread = threading.Thread(target=worker.run)
    thread.start()
    listening = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"
    wait_for(lambda: db.execute(listening).fetchall(), "the worker does not listen")
    relay = Relay(live)
    for n in range(2):  # the first may have come before the worker had looked for the last time
        wait_for(lambda: worker.waiting_for == "empty", "the worker does not wait")
        write(mine, n)
        mine.commit()
        if by == "hint":
            live.hint(["orders"])
        else:
            assert relay.run_once() <= 1
        wait_for(lambda n=n: got == list(range(n + 1)), "the worker was not woken")  # type: ignore[misc]
    relay.close()
    worker.stop()
    thread.join()


@pytest.mark.req("O10")
@pytest.mark.parametrize("events", [400, pytest.param(10_000, marks=pytest.mark.long)])
def test_writers_claims_publishes_and_relays_at_once_move_each_event_once_and_in_order(
    database_url: str, events: int
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic("busy", partitions=3)
        c.create_group("busy", "g", custody.Policy(ordering="key"))
        over = threading.Event()

        def writer(name: int) -> None:
            with psycopg.connect(database_url) as connection:
                for n in range(events // 4):
                    key = f"k{(n + name) % 6}"
                    write(connection, {"w": name, "n": n}, "busy", ordering_key=key)
                    if n % 7 == 0:
                        connection.rollback()
                        write(connection, {"w": name, "n": n}, "busy", ordering_key=key)
                    connection.commit()

        def publisher() -> None:
            while not over.is_set():
                c.publish("busy", {"w": -1, "n": 0}, key="own")

        def relaying() -> None:
            relay = Relay(database_url, poll="5ms")
            while not over.is_set():
                relay.run_once()
            relay.close()

        got: dict[str, list[tuple[int, int]]] = {}

        with ThreadPoolExecutor(7) as threads:
            others = [threads.submit(publisher), threads.submit(relaying)]
            writers = [threads.submit(writer, n) for n in range(4)]

            def consuming() -> None:
                while not over.is_set():
                    lease = c.claim("busy", "g", max_messages=50)
                    for m in lease:
                        got.setdefault(m.key or "", []).append((m.payload["w"], m.payload["n"]))
                    if lease:
                        lease.ack()

            others.append(threads.submit(consuming))
            try:
                for each in writers:
                    each.result(120)
                with Outbox(database_url) as outbox:
                    wait_for(lambda: not outbox.events(states=["PENDING", "CLAIMED"], limit=1), "not all moved", 60)
            finally:
                over.set()
            for each in others:
                each.result(60)
        while lease := c.claim("busy", "g", max_messages=1000):
            for m in lease:
                got.setdefault(m.key or "", []).append((m.payload["w"], m.payload["n"]))
            lease.ack()
        got.pop("own", None)
        assert sorted(pair for pairs in got.values() for pair in pairs) == [
            (w, n) for w in range(4) for n in range(events // 4)
        ]
        with psycopg.connect(database_url) as connection:
            for key, pairs in got.items():
                ids = connection.execute(
                    "SELECT (convert_from(payload, 'UTF8')::jsonb ->> 'w')::int, "
                    "(convert_from(payload, 'UTF8')::jsonb ->> 'n')::int "
                    "FROM custody.outbox WHERE ordering_key = %s ORDER BY id",
                    [key],
                ).fetchall()
                assert ids == pairs, f"{key} is out of order"


def test_events_written_before_a_topic_grew_go_where_their_keys_belong_now(
    live: custody.Custody, mine: psycopg.Connection[Any], database_url: str
) -> None:
    """Those that were committed, and those of a transaction that was open meanwhile."""
    with psycopg.connect(database_url) as early:
        for n in range(40):
            write(early, n, ordering_key=f"k{n % 10}")
    for n in range(40, 80):
        write(mine, n, ordering_key=f"k{n % 10}")
    live.grow_topic("orders", partitions=4)
    mine.commit()
    live.publish_many("orders", [custody.Outgoing(n, key=f"k{n % 10}") for n in range(80, 120)])
    seen: dict[str | None, list[int]] = {}
    wait_for(lambda: drained(live, seen), "something is left")
    assert seen == {f"k{k}": [n for n in range(120) if n % 10 == k] for k in range(10)}
    for partition in range(4):
        for message in live.read("orders", partition, max_messages=200):
            assert placement.partition_for(message.key or "", 4) == partition


def drained(c: custody.Custody, seen: dict[str | None, list[int]]) -> bool:
    """Handles what there is; True when nothing is left."""
    lease = c.claim("orders", "g", max_messages=7)
    for message in lease:
        seen.setdefault(message.key, []).append(message.payload)
    if lease:
        lease.ack()
    return lease.reason == "empty"


@pytest.mark.parametrize("max_depth", [None, 1])
def test_a_key_that_waits_does_not_hold_up_the_others(
    c: custody.Custody, db: psycopg.Connection, clock: Clock, max_depth: int | None
) -> None:
    c.create_topic("orders", max_depth=max_depth)
    c.create_group("orders", "g", custody.Policy(ordering="key"))
    call = "SELECT custody.outbox_write('t', '1', 'orders', p_ordering_key => %s, p_available_at => %s)"
    call += " FROM generate_series(1, %s)"
    past = clock() - timedelta(days=1)
    db.execute(call, ["a", clock() + timedelta(days=1), 1])
    db.execute(call, ["a", past, 1000 if max_depth is None else 1])
    db.execute(call, ["b", past, 1])
    assert [message.key for message in c.claim("orders", "g", max_messages=10)] == ["b"]


@pytest.mark.parametrize("while_open", [False, True])
def test_events_of_a_topic_that_was_made_anew_hold_up_no_key(
    c: custody.Custody, db: psycopg.Connection, mine: psycopg.Connection[Any], clock: Clock, while_open: bool
) -> None:
    call = "SELECT custody.outbox_write('t', %s, 'orders', p_ordering_key => 'a', p_available_at => '2000-01-01')"
    c.create_topic("orders")
    (mine if while_open else db).execute(call, ["1"])
    c.delete_topic("orders")
    c.create_topic("orders")
    mine.commit()
    c.create_group("orders", "g", custody.Policy(ordering="key"))
    db.execute(call, ["2"])
    assert [message.payload for message in c.claim("orders", "g", max_messages=10)] == [2]
