"""What a client remembers of its leases: little, and nothing of what is settled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

import custody
from custody import Outgoing
from custody.remote import leases
from custody.remote.leases import Leases, ranges_of, without

pytestmark = pytest.mark.core

offsets = st.frozensets(st.integers(0, 30))


def spelled(ranges: leases.Ranges) -> list[int]:
    return [offset for first, end in ranges for offset in range(first, end)]


@given(offsets, offsets)
def test_ranges_are_sets_of_offsets(some: frozenset[int], gone: frozenset[int]) -> None:
    assert spelled(ranges_of(some)) == sorted(some)
    left = without(ranges_of(some), ranges_of(gone))
    assert spelled(left) == sorted(some - gone)
    assert left == ranges_of(some - gone)


def size(kept: Leases) -> int:
    """About how much memory the offsets take."""
    return sum(sys.getsizeof(held.ranges) + 120 * len(held.ranges) for held in kept._held.values())


def test_large_leases_take_no_more_than_small_ones() -> None:
    kept = Leases()
    for n in range(1_000):
        kept.remember(uuid4(), "orders", "g", 0, range(n * 1_000, (n + 1) * 1_000))
    assert len(kept._held) == 1_000
    assert size(kept) < 1_000_000


def test_leases_in_pieces_make_others_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "REMEMBERED", 100)
    kept = Leases()
    first, second, third = uuid4(), uuid4(), uuid4()
    kept.remember(first, "orders", "g", 0, range(50))
    kept.remember(second, "orders", "g", 0, range(1_000, 1_051))
    kept.settled(second, range(1_000, 1_051, 2))
    assert kept.get(first) is not None
    kept.remember(third, "orders", "g", 0, range(2_000, 2_200, 2))
    assert (kept.get(first), kept.get(second)) == (None, None)
    held = kept.get(third)
    assert held is not None
    assert len(list(held.offsets)) == 100
    kept.settled(third, None)
    assert (kept._held, kept._ranges) == ({}, 0)


def test_transactions_that_never_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "OPEN", 10)
    kept = Leases()
    for _ in range(100):
        kept.acked_in(uuid4(), uuid4(), [1, 2, 3])
    assert len(kept._transactions) == 10


@pytest.fixture
def kept(remote: custody.Custody) -> Leases:
    found = remote._leases  # type: ignore[attr-defined]
    assert isinstance(found, Leases)
    return found


def test_what_is_settled_is_forgotten(remote: custody.Custody, orders: Callable[[int], None], kept: Leases) -> None:
    orders(3)
    lease = remote.claim("orders", "stock", max_messages=3)
    lease.ack(lease.messages[1])
    held = kept.get(lease.lease_id)
    assert held is not None
    assert list(held.offsets) == [0, 2]
    lease.nack()
    assert kept._held == {}


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_transaction_acknowledges_is_forgotten_by_its_commit(
    c: custody.Custody, remote: custody.Custody, orders: Callable[[int], None], kept: Leases, whole: bool
) -> None:
    orders(3)
    producer = remote.init_producer("p")
    lease = remote.claim("orders", "stock", max_messages=3)
    which = () if whole else (lease.messages,)
    aborted = producer.transaction()
    aborted.ack(lease, *which)
    aborted.abort()
    assert (kept.get(lease.lease_id) is not None, kept._transactions) == (True, {})
    with producer.transaction() as transaction:
        transaction.publish_many("orders", [Outgoing(7)])
        transaction.ack(lease, *which)
        assert kept.get(lease.lease_id) is not None
    assert (kept._held, kept._transactions) == ({}, {})
    assert c.stats("orders", "stock").in_flight == 0
