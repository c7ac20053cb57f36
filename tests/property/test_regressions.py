"""What the random runs have found, each as the shortest story that shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.property.tables import Connection, Reader

import custody

if TYPE_CHECKING:
    from tests.conftest import Clock

TOPIC, GROUP = "orders", "stock"


def start(c: custody.Custody, *keys: str | None, **policy: object) -> None:
    c.create_topic(TOPIC)
    settings = {"ordering": "key", "backoff": custody.Constant("5s"), **policy}
    c.create_group(TOPIC, GROUP, custody.Policy(**settings))  # type: ignore[arg-type]
    if keys:
        c.publish_many(TOPIC, [custody.Outgoing(None, key=key) for key in keys])


def claim(c: custody.Custody, most: int = 100) -> custody.Lease:
    return c.claim(TOPIC, GROUP, max_messages=most, visibility_timeout="30s")


def offsets(lease: custody.Lease) -> list[int]:
    return [message.offset for message in lease]


@pytest.mark.core
def test_a_claim_of_a_topic_without_messages_is_empty(c: custody.Custody) -> None:
    start(c)
    assert claim(c).reason == "empty"


@pytest.mark.core
@pytest.mark.req("K2", "K4")
def test_a_retry_parked_behind_a_never_delivered_message_is_woken(c: custody.Custody, clock: Clock) -> None:
    """The key has a parked retry left when the last of its other parked messages is handed out."""
    start(c, "a", "a", "a")
    lease = claim(c)
    lease.nack(lease.messages[2], delay=0)
    lease.release(lease.messages[1])
    assert claim(c).reason == "empty"  # both are parked behind offset 0 now
    lease.ack()
    second = claim(c)
    assert offsets(second) == [1]
    second.ack()
    assert offsets(claim(c)) == [2]


@pytest.mark.core
@pytest.mark.req("K2")
def test_parked_runs_of_a_key_that_overlap_are_handed_out_in_order(c: custody.Custody, clock: Clock) -> None:
    """One settle parks some followers of a key and releases one between them, which is then parked by itself."""
    start(c, "a", "a", "a", "a")
    c.settle(claim(c).lease_id, {0: custody.Outcome("nack", delay=5), 2: custody.Outcome("release")})
    assert claim(c).reason == "empty"  # offsets 1 and 3 are parked in one run, 2 in another
    clock.move(5)
    order = []
    while lease := claim(c, 2):
        order += offsets(lease)
        lease.ack()
    assert order == [0, 1, 2, 3]


@pytest.mark.core
@pytest.mark.req("K1")
def test_a_due_retry_of_a_blocked_key_does_not_hide_that_of_another(c: custody.Custody, clock: Clock) -> None:
    """A claim of one looks past what it cannot hand out, instead of answering that there is nothing."""
    start(c, "a", "a", "b")
    lease = claim(c)
    lease.nack(lease.messages[1], delay=0)
    lease.nack(lease.messages[2], delay=1)
    clock.move(1)
    assert offsets(claim(c, 1)) == [2]


@pytest.mark.core
@pytest.mark.req("C4")
def test_what_expired_alone_stays_alone_beside_what_was_released(c: custody.Custody, clock: Clock) -> None:
    start(c, None, None, ordering="none")
    claim(c, 1)
    released = claim(c, 1)
    released.extend("100s")
    clock.move(40)
    released.release()
    assert [offsets(claim(c)), offsets(claim(c))] == [[1], [0]]


@pytest.mark.core
@pytest.mark.req("C4")
def test_what_is_parked_on_its_way_back_keeps_to_smaller_leases(c: custody.Custody, clock: Clock) -> None:
    """A message that comes back from a lost lease behind its key is still leased in a tenth of the company."""
    start(c, "a", "a", "b")
    claim(c, 1).nack(requeue=False)
    assert offsets(claim(c)) == [1, 2]
    c.redrive(TOPIC, GROUP)
    clock.move(40)
    assert offsets(claim(c)) == [2]
    first = claim(c)
    assert offsets(first) == [0]
    first.ack()
    c.publish(TOPIC, None, key="c")
    assert offsets(claim(c)) == [1]


@pytest.mark.core
@pytest.mark.req("V3", "C4")
def test_death_by_expiry_is_one_move_in_the_journal(c: custody.Custody, clock: Clock, db: Connection) -> None:
    """From processing to dead: the message is never ready in between."""
    start(c, "a", max_attempts=1)
    claim(c)
    clock.move(40)
    assert claim(c).reason == "empty"
    assert [entry.kind for entry in Reader(db, TOPIC, GROUP).journal()] == ["start", "claim", "dead"]
    assert c.dead(TOPIC, GROUP)[0].reason == "lease_expired"


@pytest.mark.core
@pytest.mark.req("G14", "C2")
def test_a_claim_that_copies_a_death_can_hand_out_a_retry_and_a_fresh_message(c: custody.Custody, clock: Clock) -> None:
    """An expired message dies, and the lease of the same claim has two parts, which get the same deadline."""
    start(c, None, None, None, ordering="none", max_attempts=2, dead_letter="topic")
    claim(c, 1)
    clock.move(40)
    leases = {message.offset: lease for lease in (claim(c, 1), claim(c, 1)) for message in lease}
    assert leases.keys() == {0, 1}
    leases[1].nack(delay=30)
    clock.move(40)
    lease = claim(c)
    assert [(message.offset, message.attempt) for message in lease] == [(1, 2), (2, 1)]
    assert [death.offset for death in c.dead(TOPIC, GROUP)] == [0]
    clock.move(29)
    assert claim(c).reason == "empty"
    assert lease.ack().settled == 2


@pytest.mark.core
@pytest.mark.req("K2", "V11")
@pytest.mark.parametrize("earlier", range(4))
def test_what_was_parked_behind_a_rewound_message_without_a_binding_is_not_hidden(
    c: custody.Custody, earlier: int
) -> None:
    """A claim whose turn it was for fresh messages parked one of them, then passed over what it was parked behind."""
    start(c)
    c.bind(TOPIC, GROUP, ["orders"])
    for _ in range(earlier):
        c.publish(TOPIC, None, routing_key="orders")
        claim(c).ack()
    passed_over = c.publish(TOPIC, None, key="a", routing_key="stock").offset
    assert not claim(c)
    c.rewind(TOPIC, GROUP, to_offset=passed_over, partition=0)
    bound = c.publish(TOPIC, None, key="a", routing_key="orders").offset
    lease = claim(c, 1)
    while lease.reason == "busy":
        lease = claim(c, 1)
    assert offsets(lease) == [bound]
