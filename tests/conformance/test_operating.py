"""Dead letters, redrive, rewind and blocked keys, by either way."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.conformance.conftest import Fill, refused
from tests.conftest import Clock

import custody
from custody import Constant, Policy

pytestmark = [pytest.mark.core, pytest.mark.req("G17")]


@pytest.fixture
def dead(orders: custody.Custody, fill: Fill) -> custody.Custody:
    """Six messages, of which those at 0, 1 and 2 are dead by two errors."""
    fill(6)
    lease = orders.claim("orders", "stock", max_messages=3)
    lease.nack(lease.messages[:2], requeue=False, error="timeout: 5 s")
    lease.nack(lease.messages[2], requeue=False, error="bad input")
    return orders


def test_dead_letters_are_listed(dead: custody.Custody, direct: custody.Custody) -> None:
    letters = dead.dead("orders", "stock")
    assert [(letter.offset, letter.last_error) for letter in letters] == [
        (0, "timeout: 5 s"),
        (1, "timeout: 5 s"),
        (2, "bad input"),
    ]
    assert letters == direct.dead("orders", "stock")
    assert len(dead.dead("orders", "stock", limit=1)) == 1


@pytest.mark.req("V6", "N4")
def test_dead_letters_are_listed_by_the_conditions_of_a_redrive(dead: custody.Custody, clock: Clock) -> None:
    listed: list[tuple[dict[str, Any], list[int]]] = [
        ({"where_error": "timeout: 5%"}, [0, 1]),
        ({"where_error": "bad & input"}, []),
        ({"key": "k2"}, [2]),
        ({"partition": 0, "offsets": (1, 2)}, [1, 2]),
        ({"partition": 0, "offsets": []}, []),
        ({"died_from": clock()}, [0, 1, 2]),
        ({"died_until": clock()}, []),
        ({"died_of": "rejected"}, [0, 1, 2]),
        ({"died_of": "max_retries_exceeded"}, []),
        ({"where_error": "timeout%", "limit": 1}, [0]),
    ]
    for which, offsets in listed:
        assert [letter.offset for letter in dead.dead("orders", "stock", **which)] == offsets, which
        assert [offset for _, offset in dead.redrive("orders", "stock", dry_run=True, **which)] == offsets, which


@pytest.mark.req("V6")
def test_the_end_of_a_traceback_is_kept(orders: custody.Custody, fill) -> None:
    fill(2)
    lease = orders.claim("orders", "stock", max_messages=2)
    try:
        lease.messages[0].headers["missing"]
    except KeyError as error:
        lease.nack(error=error, requeue=False)
    for letter in orders.dead("orders", "stock"):
        assert letter.last_error == "KeyError: 'missing'"
        assert letter.last_traceback is not None
        assert letter.last_traceback.endswith("KeyError: 'missing'")
        assert orders.trace("orders", 0, letter.offset)[-1].traceback == letter.last_traceback


def test_dead_letters_are_redriven_by_choice(dead: custody.Custody, clock: Clock) -> None:
    assert dead.redrive("orders", "stock", where_error="timeout%", dry_run=True) == [(0, 0), (0, 1)]
    assert dead.redrive("orders", "stock", key="k2", died_from=clock(), reason="fixed") == [(0, 2)]
    assert dead.redrive("orders", "stock", died_until=clock() - timedelta(seconds=1)) == []
    assert dead.redrive("orders", "stock", partition=0, offsets=(1,)) == [(0, 1)]
    assert dead.redrive("orders", "stock", limit=5) == [(0, 0)]
    assert dead.dead("orders", "stock") == []
    (entry,) = [entry for entry in dead.trace("orders", 0, 2) if entry.kind == "redrive"]
    assert entry.worker == "test"
    assert [(m.offset, m.attempt) for m in dead.claim("orders", "stock", max_messages=9)][:3] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]


def test_dead_letters_are_given_up(dead: custody.Custody) -> None:
    assert dead.discard("orders", "stock", where_error="bad%", dry_run=True) == [(0, 2)]
    assert dead.discard("orders", "stock") == [(0, 0), (0, 1), (0, 2)]
    assert dead.dead("orders", "stock") == []


def test_a_choice_that_makes_no_sense_is_refused(dead: custody.Custody) -> None:
    for verb in (dead.redrive, dead.discard):
        for wrong in (
            {"errors": "x"},
            {"limit": 0},
            {"offsets": [1]},
            {"died_from": datetime(2030, 1, 1)},
        ):
            with refused("invalid_argument"):
                verb("orders", "stock", **wrong)
    for wrong in ({"errors": "x"}, {"offsets": [1]}, {"died_from": datetime(2030, 1, 1)}):
        with refused("invalid_argument"):
            dead.dead("orders", "stock", **wrong)


@pytest.mark.req("G10")
def test_a_dead_letter_topic_is_replayed_once(c: custody.Custody, fill: Fill) -> None:
    c.create_topic("orders")
    c.create_topic("second")
    c.create_group("orders", "g", Policy(dead_letter="topic"))
    fill(2)
    c.claim("orders", "g", max_messages=2).nack(requeue=False, error="no")
    first = c.replay("orders-dlq", 0, 0)
    assert (first.topic, first.offset, first.duplicate, first.resolved) == ("orders", 2, False, True)
    again = c.replay("orders-dlq", 0, 0)
    assert (again.offset, again.duplicate) == (2, True)
    assert c.replay("orders-dlq", 0, 1, target_topic="second", reason="moved").topic == "second"
    assert c.dead("orders", "g") == []
    with refused("topic_not_found"):
        c.replay("nothing-dlq", 0, 0)
    with refused("offset_out_of_range"):
        c.replay("orders-dlq", 0, 9)


@pytest.mark.req("V4", "G17")
def test_waiting_retries_are_brought_forward_by_choice(c: custody.Custody, fill: Fill) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", Policy(ordering="key", backoff=Constant("1h")))
    fill(4, keys=2)  # 0 and 2 of one key, 1 and 3 of the other
    lease = c.claim("orders", "g", max_messages=4)
    lease.nack(lease.messages[0], error="timeout: a")
    lease.later(lease.messages[1], after="2h")
    assert c.retry_now("orders", "g", where_error="refused%") == 0
    assert c.retry_now("orders", "g", where_error="timeout%", reason="it is back") == 1
    again = c.claim("orders", "g", max_messages=4)
    assert [(message.offset, message.attempt) for message in again] == [(0, 2)], "in front of its key, as any retry"
    entry = c.trace("orders", 0, 0)[-2]
    assert (entry.kind, entry.error) == ("hasten", "it is back")
    again.ack()
    key = lease.messages[1].key
    assert c.retry_now("orders", "g", key=key) == 1
    assert c.retry_now("orders", "g") == 0, "nothing waits any more"
    assert c.stats("orders", "g").waiting == 1
    with refused("group_not_found"):
        c.retry_now("orders", "nobody")


def test_a_rewind_gives_everything_back(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(3)
    clock.move(60)
    fill(2)
    lease = orders.claim("orders", "stock", max_messages=5)
    lease.ack(lease.messages[:3])
    (looked,) = orders.rewind("orders", "stock", to_offset=1, dry_run=True)
    assert (looked.partition, looked.target, looked.messages) == (0, 1, 4)
    assert orders.stats("orders", "stock").in_flight == 2
    (done,) = orders.rewind("orders", "stock", to_time=clock(), partition=0, reason="again")
    assert (done.target, done.messages) == (3, 2)
    with refused("lease_lost"):
        lease.ack()
    for wrong in ({}, {"to_offset": 0, "to_time": clock()}, {"to_time": datetime(2030, 1, 1)}):
        with refused("invalid_argument"):
            orders.rewind("orders", "stock", **wrong)  # type: ignore[arg-type]
    for partition in (5, -1):
        with refused("partition_not_found"):
            orders.rewind("orders", "stock", to_offset=0, partition=partition)


def test_a_held_key_is_released(c: custody.Custody, fill: Fill) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", Policy(ordering="key", on_dead="hold"))
    fill(3, keys=1)
    lease = c.claim("orders", "g", max_messages=3)
    assert lease.nack(lease.messages[0], requeue=False, error="no").released == (1, 2)
    (blocked,) = c.blocked_keys("orders", "g")
    assert (blocked.key, blocked.why, blocked.partition) == ("k0", "held", 0)
    assert len(c.blocked_keys("orders", "g", limit=1)) == 1
    assert c.release_key("orders", "g", "k0", reason="looked at") == 1
    assert c.release_key("orders", "g", "k0") == 0
    assert "held" not in [blocked.why for blocked in c.blocked_keys("orders", "g")]
    assert [m.offset for m in c.claim("orders", "g", max_messages=3)] == [1, 2]


def test_a_waiting_message_is_skipped(dead: custody.Custody, clock: Clock) -> None:
    dead.skip("orders", "stock", 0, 1, reason="known")
    assert [letter.offset for letter in dead.dead("orders", "stock")] == [0, 2]
    for offset in (1, 5, 99):
        with refused("not_skippable"):
            dead.skip("orders", "stock", 0, offset)
    with refused("partition_not_found"):
        dead.skip("orders", "stock", 9, 0)
