"""The state of messages by offset, and live leases."""

from __future__ import annotations

import pytest
from tests.conftest import Clock

import custody

pytestmark = [pytest.mark.core, pytest.mark.req("N6")]


def publish(c: custody.Custody, count: int, *, keys: int = 10) -> None:
    c.create_topic("orders")
    c.create_group("orders", "billing", custody.Policy(ordering="key", max_attempts=1, on_dead="hold"))
    c.publish_many("orders", [custody.Outgoing(number, key=f"k{number % keys}") for number in range(count)])


def test_each_message_has_a_bin_while_there_are_few(c: custody.Custody) -> None:
    publish(c, 40)
    lease = c.claim("orders", "billing", max_messages=10)
    lease.nack(lease.messages[3], error="broken")
    lease.ack(*[message for message in lease.messages[:9] if message.offset != 3])
    c.claim("orders", "billing", max_messages=10)
    (of,) = c.offset_map("orders", "billing")
    assert (of.first_offset, of.until_offset, of.width) == (0, 40, 1)
    by_offset = {one.first_offset: one for one in of.bins}
    assert by_offset[3].dead == 1
    assert by_offset[9].in_flight == 1
    assert by_offset[13].parked == 1, "behind the dead one"
    assert not {0, 1, 2, 4} & by_offset.keys(), "what is done is in no bin"
    assert max(by_offset) < of.frontier


def test_many_messages_share_bins_that_add_up(c: custody.Custody) -> None:
    publish(c, 5000, keys=7)
    leases = [c.claim("orders", "billing", max_messages=700) for _ in range(3)]
    leases[0].nack(leases[0].messages[2], error="broken")
    leases[0].ack(*[message for message in leases[0].messages[:500] if message.key != "k2"])
    c.claim("orders", "billing", max_messages=100)
    (of,), stats = c.offset_map("orders", "billing"), c.stats("orders", "billing")
    assert (of.width, of.until_offset) == (25, 5000)
    for name in ("in_flight", "waiting", "parked", "dead"):
        assert sum(getattr(one, name) for one in of.bins) == getattr(stats, name), name
    assert all(one.in_flight + one.waiting + one.parked + one.dead <= of.width for one in of.bins)
    assert all(one.first_offset % of.width == 0 for one in of.bins)


def test_a_part_of_a_partition(c: custody.Custody) -> None:
    publish(c, 1000)
    c.claim("orders", "billing", max_messages=500)
    (of,) = c.offset_map("orders", "billing", partition=0, from_offset=450, until_offset=550)
    assert (of.first_offset, of.until_offset, of.width) == (450, 550, 1)
    assert [one.first_offset for one in of.bins] == [*range(450, 500)]
    (nothing,) = c.offset_map("orders", "billing", from_offset=5000, until_offset=10)
    assert (nothing.first_offset, nothing.until_offset, nothing.bins) == (1000, 1000, ())
    assert c.offset_map("orders", "billing", partition=7) == []


def test_an_expired_lease_waits(c: custody.Custody, clock: Clock) -> None:
    publish(c, 10)
    c.claim("orders", "billing", max_messages=5)
    clock.move(3600)
    (of,) = c.offset_map("orders", "billing")
    assert (sum(one.in_flight for one in of.bins), sum(one.waiting for one in of.bins)) == (0, 5)


def test_leases_have_worker_and_deadline(database_url: str) -> None:
    with custody.connect(database_url, worker="worker-7") as c:
        publish(c, 20)
        assert c.leases("orders", "billing") == []
        first = c.claim("orders", "billing", max_messages=3, visibility_timeout="60s")
        second = c.claim("orders", "billing", max_messages=4, visibility_timeout="30s")
        found = c.leases("orders", "billing")
        assert [(one.lease_id, one.messages, one.worker, one.attempt) for one in found] == [
            (second.lease_id, 4, "worker-7", 1),
            (first.lease_id, 3, "worker-7", 1),
        ]
        assert found[0].deadline == second.deadline
        assert len(c.leases("orders", "billing", limit=1)) == 1
