"""Offsets that no log has, and lists of nothing or of everything: refused, or answered, in one way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.conformance.conftest import Fill, refused

import custody
from custody import Outcome
from custody.errors import LeaseLost

pytestmark = [pytest.mark.core, pytest.mark.req("G17")]

NOWHERE = [-1, -(2**40), 2**62 + 1]


@pytest.mark.parametrize("offset", NOWHERE)
def test_an_offset_that_no_log_has(orders: custody.Custody, fill: Fill, offset: int) -> None:
    fill(3)
    orders.create_group("orders", "bare", bare=True)
    with refused("offset_out_of_range"):
        orders.rewind("orders", "stock", to_offset=offset, partition=0)
    with refused("offset_out_of_range"):
        orders.create_group("orders", "other", start=offset)
    with refused("offset_out_of_range"):
        orders.commit("orders", "bare", 0, offset)
    with refused("offset_out_of_range"):
        orders.replay("orders", 0, offset)
    with refused("not_skippable"):
        orders.skip("orders", "stock", 0, offset)
    with refused("delay_not_found"):
        orders.cancel_delayed("orders", offset)
    with refused("offset_conflict"):
        orders.publish("orders", 1, expected_offset=offset)
    assert orders.trace("orders", 0, offset) == []
    assert orders.redrive("orders", "stock", partition=0, offsets=[offset]) == []
    assert orders.topic("orders").message_count == 3


def test_the_end_of_the_log_is_no_mistake(orders: custody.Custody, fill: Fill) -> None:
    fill(3)
    orders.claim("orders", "stock", max_messages=3).ack()
    assert orders.read("orders", offset=2**62 + 1) == []
    (rewound,) = orders.rewind("orders", "stock", to_offset=2**62 + 1)
    assert rewound.messages == 0
    with refused("offset_out_of_range"):
        orders.read("orders", offset=-1)
    with refused("offset_out_of_range"):
        orders.rewind("orders", "stock", to_offset=-1)


def test_what_is_not_there_is_said_first(orders: custody.Custody) -> None:
    with refused("group_not_found"):
        orders.rewind("orders", "none", to_offset=-1)
    with refused("group_not_found"):
        orders.commit("orders", "none", 0, -1)
    with refused("topic_not_found"):
        orders.create_group("none", "g", start=-1)
    with refused("topic_not_found"):
        orders.read("none", offset=-1)
    with refused("topic_not_found"):
        orders.trace("none", 0, -1)


Settle = Callable[[custody.Custody, custody.Lease, list[int]], object]


@pytest.mark.req("G14")
@pytest.mark.parametrize("nowhere", NOWHERE)
@pytest.mark.parametrize(
    "settle",
    [
        lambda c, lease, offsets: c.ack(lease.lease_id, offsets),
        lambda c, lease, offsets: c.nack(lease.lease_id, offsets, error="no"),
        lambda c, lease, offsets: c.settle(lease.lease_id, dict.fromkeys(offsets, Outcome("later", delay=5))),
    ],
)
def test_a_lease_holds_no_such_offset(orders: custody.Custody, fill: Fill, settle: Settle, nowhere: int) -> None:
    fill(2)
    lease = orders.claim("orders", "stock", max_messages=2)
    with pytest.raises(LeaseLost) as lost:
        settle(orders, lease, [0, nowhere])
    assert lost.value.lost == (nowhere,)
    assert orders.stats("orders", "stock").in_flight == 1
    with pytest.raises(LeaseLost) as lost:
        settle(orders, lease, [nowhere])
    assert lost.value.lost == (nowhere,)
    with pytest.raises(LeaseLost) as lost:
        orders.extend(lease.lease_id, "1m", offset=nowhere)
    assert lost.value.lost == (nowhere,)
    assert orders.ack(lease.lease_id).settled == 1


@pytest.mark.parametrize("limit", [0, 1, 100_000, 100_001, 1_000_000])
def test_lists_of_nothing_and_of_everything(orders: custody.Custody, fill: Fill, limit: int) -> None:
    fill(2)
    orders.claim("orders", "stock", max_messages=1).nack(requeue=False)
    orders.publish("orders", 1, delay="1h")
    most = min(limit, 1)
    assert len(orders.dead("orders", "stock", limit=limit)) == most
    assert len(orders.delayed("orders", limit=limit)) == most
    assert orders.blocked_keys("orders", "stock", limit=limit) == []
    for listed in (orders.dead, orders.blocked_keys):
        with refused("group_not_found"):
            listed("orders", "none", limit=limit)
        with refused("invalid_argument"):
            listed("orders", "stock", limit=-1)


def test_a_claim_does_not_make_the_group_default(orders: custody.Custody, direct: custody.Custody, fill: Fill) -> None:
    fill(2)
    with refused("group_not_found"):
        orders.claim("orders", "default")
    orders.create_group("orders", "default")
    assert len(orders.claim("orders", "default")) == 1
    direct.delete_group("orders", "default")
    with refused("group_not_found"):
        orders.claim("orders", "default")
    assert [group.name for group in direct.groups("orders")] == ["stock"]
