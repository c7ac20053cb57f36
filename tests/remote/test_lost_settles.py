"""A settle whose answer was lost is told from a lost lease."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.conftest import Clock
from tests.remote.cutting import Proxy, When

import custody
from custody import Lease, Outcome
from custody.errors import DatabaseUnavailable, LeaseLost
from custody.model.entities import Settled

pytestmark = pytest.mark.core

Fill = Callable[[int], None]
Verb = Callable[[Lease], Settled]
VERBS: dict[str, Verb] = {
    "ack": lambda lease: lease.ack(),
    "ack some": lambda lease: lease.ack(lease.messages),
    "nack": lambda lease: lease.nack(error="x"),
    "nack some": lambda lease: lease.nack(lease.messages, error="x"),
    "dead": lambda lease: lease.nack(requeue=False),
    "later": lambda lease: lease.later(after="1m"),
    "skip": lambda lease: lease.skip(reason="cancelled"),
    "release": lambda lease: lease.release(),
}


@pytest.mark.req("G14")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_settle_is_repeated_without_a_false_alarm(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, orders: Fill, when: When, verb: str
) -> None:
    orders(3)
    lease = remote.claim("orders", "stock", max_messages=3)
    proxy.lose("POST /messages/", when)
    settled = VERBS[verb](lease)
    assert (proxy.waiting, settled.settled) == (0, 3)
    assert settled.dead == ((0, 1, 2) if verb == "dead" else ())
    assert c.stats("orders", "stock").in_flight == 0
    kinds = [entry.kind for entry in c.trace("orders", 0, 0) if entry.kind != "claim"]
    assert kinds == [verb.removesuffix(" some")]


@pytest.mark.req("G14")
@pytest.mark.parametrize("verb", VERBS)
def test_a_lease_that_is_lost_indeed_is_said_to_be(
    remote: custody.Custody, proxy: Proxy, orders: Fill, clock: Clock, verb: str
) -> None:
    orders(3)
    lease = remote.claim("orders", "stock", max_messages=3, visibility_timeout="5s")
    proxy.lose("POST /messages/", "before", then=lambda: clock.move(5))
    with pytest.raises(LeaseLost) as lost:
        VERBS[verb](lease)
    assert lost.value.lost == (0, 1, 2)


@pytest.mark.req("G14")
def test_each_message_is_looked_up_by_itself(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, orders: Fill, clock: Clock
) -> None:
    """The first was acknowledged before, the others by nobody: an ack of the whole lease must not be called done."""
    orders(3)
    lease = remote.claim("orders", "stock", max_messages=3, visibility_timeout="5s")
    lease.ack(lease.messages[0])
    proxy.lose("POST /messages/ack", "before", then=lambda: clock.move(5))
    with pytest.raises(LeaseLost) as lost:
        lease.ack()
    assert lost.value.lost == (1, 2)
    again = remote.claim("orders", "stock", max_messages=3)
    assert len(again) == 1  # in a small piece: the lease was lost
    outcomes = {again.messages[0].offset: Outcome("dead", error="no"), 99: Outcome("ack")}
    proxy.lose("POST /messages/settle", "after")
    with pytest.raises(LeaseLost) as lost:
        remote.settle(again.lease_id, outcomes)
    assert lost.value.lost == (99,)
    assert len(c.dead("orders", "stock")) == 1


@pytest.mark.req("G14")
def test_what_another_client_has_claimed_is_known_too(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, orders: Fill
) -> None:
    orders(1)
    lease = c.claim("orders", "stock")
    proxy.lose("POST /messages/ack", "after")
    assert remote.ack(lease.lease_id) == Settled(settled=1, already=True)


def test_claims_reads_and_extensions_are_repeated(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, orders: Fill
) -> None:
    orders(2)
    proxy.lose("GET /messages/orders", "after")
    lease = remote.claim("orders", "stock")
    assert [message.offset for message in lease] == [1]  # the first one is leased to nobody until its deadline
    proxy.lose("POST /messages/extend", "after")
    assert lease.extend("1m") > lease.messages[0].published_at
    proxy.lose("GET /topics", "before", times=2)
    assert remote.topic("orders") == c.topic("orders")
    assert proxy.waiting == 0


@pytest.mark.req("G14")
def test_an_ack_with_the_next_claim_is_repeated_without_a_false_alarm(
    c: custody.Custody, remote: custody.Custody, proxy: Proxy, orders: Fill
) -> None:
    orders(3)
    lease = remote.claim("orders", "stock")
    proxy.lose("GET /messages/orders", "after")
    following = lease.next()
    assert (proxy.waiting, following.lost, following.settled) == (0, None, Settled(settled=1, already=True))
    assert [message.offset for message in following] == [2]  # the second one comes back when its lease expires
    assert [entry.kind for entry in c.trace("orders", 0, 0)] == ["claim", "ack"]


def test_a_repeat_for_all_of_a_lease_counts_all_that_it_has_settled(
    remote: custody.Custody, proxy: Proxy, orders: Fill
) -> None:
    orders(3)
    lease = remote.claim("orders", "stock", max_messages=3)
    lease.ack(lease.messages[0])
    proxy.lose("POST /messages/ack", "after")
    assert lease.ack() == Settled(settled=3, already=True)


@pytest.mark.req("G14", "X1")
def test_a_loss_is_named_by_a_repeat_too(remote: custody.Custody, proxy: Proxy, orders: Fill, clock: Clock) -> None:
    orders(3)
    lease = remote.claim("orders", "stock", max_messages=3, visibility_timeout="5s")
    first, second, third = lease.messages
    for message in (first, third):
        lease.extend("1m", message=message)
    clock.move(5)
    with pytest.raises(LeaseLost) as lost:
        lease.ack(first, second)
    assert lost.value.lost == (1,)
    proxy.lose("POST /messages/ack", "after")
    with pytest.raises(LeaseLost) as lost:
        lease.ack()
    assert lost.value.lost == (1,)


@pytest.mark.req("G14")
@pytest.mark.parametrize("verb", VERBS)
def test_a_settle_that_stayed_unknown_can_be_repeated_without_a_false_alarm(
    c: custody.Custody, proxy: Proxy, orders: Fill, verb: str
) -> None:
    orders(3)
    with custody.connect(proxy.url, retry_for=0) as remote:
        lease = remote.claim("orders", "stock", max_messages=3)
        proxy.lose("POST /messages/", "after")
        with pytest.raises(DatabaseUnavailable, match="unknown"):
            VERBS[verb](lease)
        for _ in range(2):
            again = VERBS[verb](lease)
            assert (again.settled, again.already) == (3, True)
    kinds = [entry.kind for entry in c.trace("orders", 0, 0) if entry.kind != "claim"]
    assert kinds == [verb.removesuffix(" some")]


@pytest.mark.req("G14")
def test_what_was_settled_before_and_what_stayed_unknown_are_repeated_together(proxy: Proxy, orders: Fill) -> None:
    orders(2)
    with custody.connect(proxy.url, retry_for=0) as remote:
        lease = remote.claim("orders", "stock", max_messages=2)
        first, second = lease.messages
        lease.ack(first)
        proxy.lose("POST /messages/ack", "after")
        with pytest.raises(DatabaseUnavailable, match="unknown"):
            lease.ack(second)
        assert lease.ack(first, second) == Settled(settled=2, already=True)
