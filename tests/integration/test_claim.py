"""Claim: what a lease holds, why it may be empty, redeliveries, the choice of a partition, and the caps."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, Literal

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, fill, keyed, offsets, start

import custody
from custody import Constant, Custody, Exponential, Outgoing, Policy
from custody.errors import GroupNotFound, InvalidArgument, LeaseLost, PartitionNotFound, TopicNotFound

pytestmark = pytest.mark.core


@pytest.mark.req("C1", "V5")
def test_a_lease_has_an_id_a_deadline_and_its_messages(c: Custody, clock: Clock) -> None:
    c.create_topic(TOPIC)
    c.publish(TOPIC, {"n": 1}, key="k", headers={"h": "1"})
    c.create_group(TOPIC, GROUP)
    lease = c.claim(TOPIC, GROUP, max_messages=10)
    assert lease
    assert (len(lease), lease.reason, lease.deadline) == (1, None, clock.time + timedelta(seconds=30))
    (message,) = lease
    assert (message.topic, message.partition, message.offset, message.attempt) == (TOPIC, 0, 0, 1)
    assert (message.key, message.payload, message.headers) == ("k", {"n": 1}, {"h": "1"})
    assert str(lease.lease_id) in repr(lease)


@pytest.mark.req("C1")
def test_a_claim_takes_one_message_unless_more_are_asked_for(c: Custody) -> None:
    start(c, 10)
    assert offsets(c.claim(TOPIC, GROUP)) == [0]
    assert offsets(c.claim(TOPIC, GROUP, max_messages=4)) == [1, 2, 3, 4]
    assert offsets(c.claim(TOPIC, GROUP, max_messages=1000)) == [5, 6, 7, 8, 9]


@pytest.mark.req("V5")
def test_a_message_is_in_one_lease_at_a_time(c: Custody) -> None:
    start(c, 3)
    held = [c.claim(TOPIC, GROUP) for _ in range(3)]
    assert [offsets(lease) for lease in held] == [[0], [1], [2]]
    assert len({lease.lease_id for lease in held}) == 3
    assert not c.claim(TOPIC, GROUP)


@pytest.mark.req("G7")
def test_the_visibility_is_the_groups_or_the_claims_own(c: Custody, clock: Clock) -> None:
    start(c, 3, Policy(visibility_timeout="5m"))
    assert c.claim(TOPIC, GROUP).deadline == clock.time + timedelta(minutes=5)
    assert c.claim(TOPIC, GROUP, visibility_timeout="7s").deadline == clock.time + timedelta(seconds=7)
    assert c.claim(TOPIC, GROUP, visibility_timeout=0.5).deadline == clock.time + timedelta(milliseconds=500)


def test_an_empty_lease_is_false_and_says_why(c: Custody) -> None:
    start(c)
    lease = c.claim(TOPIC, GROUP)
    assert not lease
    assert (lease.reason, list(lease), repr(lease)) == ("empty", [], "<Lease: empty>")
    for use in (lambda: lease.lease_id, lambda: lease.deadline, lease.ack, lease.nack, lease.extend):
        with pytest.raises(LeaseLost, match="Check `if lease:` first"):
            use()


def test_waiting_messages_alone_make_a_claim_empty(c: Custody) -> None:
    start(c, 1)
    c.claim(TOPIC, GROUP).nack(delay="1h")
    assert c.claim(TOPIC, GROUP).reason == "empty"


def test_a_locked_partition_is_busy_not_empty(c: Custody, db: psycopg.Connection) -> None:
    start(c, 1)
    with db.transaction():
        db.execute("SELECT 1 FROM custody.cursors FOR UPDATE")
        assert c.claim(TOPIC, GROUP).reason == "busy"
    assert c.claim(TOPIC, GROUP)


@pytest.mark.req("G20")
def test_a_claim_that_cannot_be_is_refused(c: Custody, db: psycopg.Connection) -> None:
    start(c, 1)
    before = everything(db)
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (TopicNotFound, {"topic": "ordres"}),
        (GroupNotFound, {"group": "stok"}),
        (PartitionNotFound, {"partition": 1}),
        (PartitionNotFound, {"partition": -1}),
        (InvalidArgument, {"max_messages": 0}),
        (InvalidArgument, {"visibility_timeout": 0}),
        (InvalidArgument, {"visibility_timeout": "soon"}),
        (InvalidArgument, {"visibility_timeout": 1e12}),
    ]
    for error, arguments in wrong:
        with pytest.raises(error):
            c.claim(**{"topic": TOPIC, "group": GROUP, **arguments})
    assert everything(db) == before


@pytest.mark.req("G4")
def test_a_claim_finds_a_partition_with_work(c: Custody) -> None:
    c.create_topic(TOPIC, partitions=8)
    c.create_group(TOPIC, GROUP)
    c.publish(TOPIC, 1, partition=6)
    lease = c.claim(TOPIC, GROUP, max_messages=10)
    assert lease.messages[0].partition == 6
    assert not c.claim(TOPIC, GROUP)


@pytest.mark.req("G4")
def test_a_lease_is_of_one_partition_and_claims_reach_them_all(c: Custody) -> None:
    c.create_topic(TOPIC, partitions=4)
    c.create_group(TOPIC, GROUP)
    c.publish_many(TOPIC, list(range(40)))
    leases = [c.claim(TOPIC, GROUP, max_messages=100) for _ in range(4)]
    assert sorted(lease.messages[0].partition for lease in leases) == [0, 1, 2, 3]
    assert all(len({m.partition for m in lease}) == 1 and len(lease) == 10 for lease in leases)


@pytest.mark.req("G4")
def test_a_claim_may_name_its_partition(c: Custody) -> None:
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP)
    c.publish(TOPIC, 1, partition=0)
    assert c.claim(TOPIC, GROUP, partition=1).reason == "empty"
    assert c.claim(TOPIC, GROUP, partition=0)


@pytest.mark.req("G9", "C3")
def test_a_redelivery_says_so_in_its_headers(c: Custody, clock: Clock) -> None:
    c.create_topic(TOPIC)
    c.publish(TOPIC, 1, headers={"mine": "x"})
    c.create_group(TOPIC, GROUP, Policy(max_attempts=9, backoff=Constant("1s")))
    first = clock.time
    lease = c.claim(TOPIC, GROUP)
    assert lease.messages[0].headers == {"mine": "x"}
    for attempt in (2, 3):
        lease.nack(error=f"error {attempt - 1}")
        clock.move(1)
        lease = c.claim(TOPIC, GROUP)
        assert lease.messages[0].attempt == attempt
        assert lease.messages[0].headers == {
            "mine": "x",
            "x-custody-delivery-count": str(attempt),
            "x-custody-first-delivery": first.isoformat(),
            "x-custody-last-error": f"error {attempt - 1}",
        }


@pytest.mark.req("G9", "C3")
def test_an_expired_message_says_so_in_its_headers(c: Custody, clock: Clock) -> None:
    start(c, 20)
    first = clock.time
    c.claim(TOPIC, GROUP, max_messages=20)
    clock.move(30)
    message = c.claim(TOPIC, GROUP).messages[0]
    assert message.attempt == 2
    assert message.headers["x-custody-delivery-count"] == "2"
    assert message.headers["x-custody-first-delivery"] == first.isoformat()
    assert message.headers["x-custody-last-error"] == "lease expired"


@pytest.mark.req("C3")
def test_only_a_new_lease_counts_as_an_attempt(c: Custody, clock: Clock, database_url: str) -> None:
    start(c, 1, Policy(max_attempts=9, backoff=Constant(0)))
    lease = c.claim(TOPIC, GROUP)
    lease.extend("1m")
    lease.extend("1m", message=lease.messages[0])
    lease.nack()
    with custody.connect(database_url, clock=clock) as restarted:
        lease = restarted.claim(TOPIC, GROUP)
        assert lease.messages[0].attempt == 2
        lease.release()
        lease = restarted.claim(TOPIC, GROUP)
        assert lease.messages[0].attempt == 2
        lease.later(after=0)
    lease = c.claim(TOPIC, GROUP)
    assert lease.messages[0].attempt == 2
    clock.move(30)
    assert c.claim(TOPIC, GROUP).messages[0].attempt == 3


@pytest.mark.req("G6")
def test_a_retry_comes_before_fresh_messages_once_it_is_due(c: Custody, clock: Clock) -> None:
    start(c, 10, Policy(backoff=Constant("5s")))
    c.claim(TOPIC, GROUP).nack()
    c.claim(TOPIC, GROUP).ack()
    clock.move(5)
    assert offsets(c.claim(TOPIC, GROUP)) == [0]
    assert offsets(c.claim(TOPIC, GROUP)) == [2]


def test_retries_take_at_most_half_while_fresh_messages_wait(c: Custody, clock: Clock) -> None:
    start(c, 40, Policy(backoff=Constant("1s")))
    c.claim(TOPIC, GROUP, max_messages=20).nack()
    clock.move(1)
    lease = c.claim(TOPIC, GROUP, max_messages=10)
    assert sorted(offsets(lease)) == [*range(5), *range(20, 25)]
    rest = drain(c, max_messages=10)
    assert sorted(offsets(rest)) == [*range(5, 20), *range(25, 40)]


TURNS = {1: 12, 2: 8, 3: 8}
"""By the most messages of a claim: how many claims in a row no kind of message may go without."""


@pytest.mark.req("C5")
@pytest.mark.parametrize("ordering", ["none", "key"])
@pytest.mark.parametrize("most", TURNS)
def test_retries_fresh_returned_and_parked_messages_take_turns_in_small_claims(
    c: Custody, clock: Clock, ordering: Literal["none", "key"], most: int
) -> None:
    """No kind ends: some messages fail each time, some are given back each time, and others are published."""
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering=ordering, max_attempts=10_000, backoff=Constant(0)))
    kinds = ["failing", "failing", "released", "released", "hot"]
    c.publish_many(TOPIC, [Outgoing(kind, key=f"{kind}-{n}") for n, kind in enumerate(kinds)])
    if ordering == "key":
        c.publish_many(TOPIC, [Outgoing("parked", key="hot-4")] * 300)

    def settle(lease: custody.Lease) -> Counter[str]:
        again = [m for m in lease if m.payload == "failing"]
        back = [m for m in lease if m.payload == "released"]
        lease.nack(again)
        lease.release(back)
        lease.ack([m for m in lease if m not in again and m not in back])
        return Counter(m.payload for m in lease)

    first = c.claim(TOPIC, GROUP, max_messages=5)
    assert not c.claim(TOPIC, GROUP, max_messages=1000), "all others are behind the hot key"
    settle(first)
    assert c.stats(TOPIC, GROUP).lag == 0
    seen = dict.fromkeys(["failing", "released", "fresh", *(["parked"] if ordering == "key" else [])], 0)
    for n in range(80):
        c.publish_many(TOPIC, [Outgoing("fresh", key=f"fresh-{n}-{i}") for i in range(most)])
        clock.move(0.01)
        lease = c.claim(TOPIC, GROUP, max_messages=most)
        assert lease, lease.reason
        seen |= dict.fromkeys(settle(lease), n)
        waited = {kind: n - last for kind, last in seen.items()}
        assert max(waited.values()) <= TURNS[most], waited


@pytest.mark.parametrize(("ordering", "bound"), [("none", False), ("none", True), ("key", False)])
@pytest.mark.parametrize("how", ["released", "expired", "rewound"])
def test_what_came_back_does_not_wait_behind_a_message_that_is_given_back_each_time(
    c: Custody, clock: Clock, ordering: Literal["none", "key"], bound: bool, how: str
) -> None:
    c.create_topic(TOPIC)
    c.create_group(TOPIC, GROUP, Policy(ordering=ordering), bindings=["b"] if bound else None)
    again = ("again", "both")  # the second has a good one of its key behind it
    wanted = [*again, *[f"good-{n}" for n in range(6)]]
    keys = ["a", "both", "c", "d", "both", "e", "c", "f"]
    c.publish_many(TOPIC, [Outgoing(what, key=k, routing_key="b") for what, k in zip(wanted, keys, strict=True)])
    lease = c.claim(TOPIC, GROUP, max_messages=8)
    if how == "released":
        lease.release()
    elif how == "expired":
        clock.move(31)
    else:
        lease.ack()
        c.rewind(TOPIC, GROUP, to_offset=0)
    done: list[int] = []
    for n in range(80):
        c.publish(TOPIC, "fresh", key=f"fresh-{n}", routing_key="b")
        clock.move(0.01)
        lease = c.claim(TOPIC, GROUP)
        assert lease, lease.reason
        if lease.messages[0].payload in again:
            lease.release()
        else:
            done += offsets(lease)
            lease.ack()
    behind = {4} if ordering == "key" else set()
    assert set(range(2, 8)) - behind <= set(done)
    assert ordering == "none" or 4 not in done, "its key waits for the one before it"
    assert ordering == "none" or done.index(2) < done.index(6)
    assert len(done) > 20, "and fresh ones have their turns"


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_few_failing_messages_take_about_half_of_small_claims(c: Custody, clock: Clock, most: int) -> None:
    start(c, 1000, Policy(backoff=Constant(0), max_attempts=10_000))
    c.claim(TOPIC, GROUP, max_messages=4).nack()
    attempts = Counter[bool]()
    for _ in range(100):
        clock.move(0.01)
        lease = c.claim(TOPIC, GROUP, max_messages=most)
        attempts.update(message.attempt > 1 for message in lease)
        lease.nack([m for m in lease if m.offset < 4])
        lease.ack([m for m in lease if m.offset >= 4])
    assert attempts[True] == attempts[False] == 50 * most


def test_a_turn_that_has_nothing_to_give_goes_to_the_others(c: Custody, clock: Clock) -> None:
    """Fresh messages wait, but a cap holds them back: every claim has a retry."""
    start(c, 10, Policy(backoff=Constant(0), max_attempts=10_000, max_in_flight=1))
    failing = c.claim(TOPIC, GROUP)
    failing.nack(delay=1)
    held = c.claim(TOPIC, GROUP)
    clock.move(1)
    for _ in range(8):
        clock.move(0.01)
        lease = c.claim(TOPIC, GROUP)
        assert lease, lease.reason
        assert offsets(lease) == [0]
        lease.nack()
    held.ack()


def test_messages_of_one_lease_come_in_the_order_of_the_log(c: Custody, clock: Clock) -> None:
    start(c, 30, Policy(backoff=Constant("1s")))
    lease = c.claim(TOPIC, GROUP, max_messages=15)
    lease.nack(lease.messages[2:5])
    lease.release(lease.messages[7:9])
    clock.move(1)
    got = offsets(c.claim(TOPIC, GROUP, max_messages=10))
    assert got == sorted(got)
    assert {2, 3, 4, 7, 8} <= set(got)


@pytest.mark.req("C6")
def test_max_in_flight_stops_fresh_claims_until_something_is_settled(c: Custody, clock: Clock) -> None:
    start(c, 20, Policy(max_in_flight=5, backoff=Constant("1s")))
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    assert len(c.claim(TOPIC, GROUP, max_messages=10)) == 2
    assert c.claim(TOPIC, GROUP, max_messages=10).reason == "max_in_flight"
    lease.nack(lease.messages[0])
    lease.ack(lease.messages[1])
    assert offsets(c.claim(TOPIC, GROUP, max_messages=10)) == [5, 6]
    clock.move(1)
    assert offsets(c.claim(TOPIC, GROUP, max_messages=10)) == [0], "a retry goes on at the cap"
    assert c.claim(TOPIC, GROUP).reason == "max_in_flight"


@pytest.mark.req("C6")
def test_max_ack_holes_stops_fresh_claims_while_retries_go_on(c: Custody, clock: Clock) -> None:
    start(c, 20, Policy(max_ack_holes=3, max_attempts=9, backoff=Constant("5s")))
    lease = c.claim(TOPIC, GROUP, max_messages=7)
    lease.ack(lease.messages[1::2])
    assert c.stats(TOPIC, GROUP).holes == 3
    assert c.claim(TOPIC, GROUP, max_messages=10).reason == "ack_hole_cap_exceeded"
    lease.nack()
    assert c.claim(TOPIC, GROUP, max_messages=10).reason == "ack_hole_cap_exceeded"
    clock.move(5)
    retries = c.claim(TOPIC, GROUP, max_messages=10)
    assert offsets(retries) == [0, 2, 4, 6], "retries go on, and nothing fresh comes with them"
    retries.ack(retries.messages[:1])
    assert offsets(c.claim(TOPIC, GROUP, max_messages=2)) == [7, 8]
    retries.ack()
    assert offsets(drain(c)) == list(range(9, 20))


@pytest.mark.req("C6")
def test_messages_behind_a_blocked_key_are_no_holes(c: Custody) -> None:
    start(c, policy=Policy(ordering="key", max_ack_holes=2), keys="a" + "ab" * 20)
    lease = c.claim(TOPIC, GROUP)
    lease.nack(delay="1h")
    assert [m.key for m in drain(c, max_messages=5)] == ["b"] * 20
    stats = c.stats(TOPIC, GROUP)
    assert (stats.holes, stats.parked) == (1, 20)


@pytest.mark.req("C6")
def test_max_parked_stops_fresh_claims_and_names_the_key(c: Custody, clock: Clock) -> None:
    policy = Policy(ordering="key", max_parked=10, backoff=Constant("1h"))
    start(c, policy=policy, keys=["hot", "b", *["hot"] * 12, "b"])
    c.claim(TOPIC, GROUP).nack()
    assert [m.key for m in drain(c)] == ["b", "b"]
    assert c.stats(TOPIC, GROUP).parked == 12
    keyed(c, "cc")
    capped = c.claim(TOPIC, GROUP, max_messages=5)
    assert capped.reason == "max_parked"
    assert capped.detail is not None
    assert "hot" in capped.detail
    clock.move(3600)
    assert offsets(c.claim(TOPIC, GROUP)) == [0], "the retry that frees the key goes on"


@pytest.mark.req("C6")
def test_max_parked_counts_what_was_delivered_before_it_was_parked(c: Custody, clock: Clock) -> None:
    """Such a message has a case of its own, because it has attempts to keep."""
    start(c, policy=Policy(ordering="key", max_parked=39, visibility_timeout="10s"), keys=["hot"] * 40)
    assert len(c.claim(TOPIC, GROUP, max_messages=40)) == 40
    clock.move(10)
    lease = c.claim(TOPIC, GROUP, max_messages=40)
    assert offsets(lease) == [0, 1, 2, 3]
    lease.nack(lease.messages[0], delay="1h")
    assert drain(c) == []
    assert c.stats(TOPIC, GROUP).parked == 39
    keyed(c, "b")
    capped = c.claim(TOPIC, GROUP)
    assert (capped.reason, capped.detail) == ("max_parked", "39 messages wait behind key 'hot' of partition 0")


@pytest.mark.req("C6")
def test_each_partition_has_its_own_caps(c: Custody) -> None:
    c.create_topic(TOPIC, partitions=2)
    c.create_group(TOPIC, GROUP, Policy(max_in_flight=2))
    c.publish_many(TOPIC, [Outgoing(n, partition=n % 2) for n in range(10)])
    assert [len(c.claim(TOPIC, GROUP, max_messages=9, partition=p)) for p in (0, 1, 0)] == [2, 2, 0]


def test_many_single_releases_come_back_in_one_lease_with_a_retry(c: Custody, clock: Clock) -> None:
    start(c, 1100, Policy(backoff=Constant("1s")))
    lease = c.claim(TOPIC, GROUP, max_messages=1100)
    lease.nack(lease.messages[0])
    for message in lease.messages[1:]:
        lease.release(message)
    clock.move(1)
    again = c.claim(TOPIC, GROUP, max_messages=2000)
    assert offsets(again) == list(range(1100))
    assert again.ack().settled == 1100


@pytest.mark.req("V4")
def test_backoff_is_stored_and_needs_no_process(c: Custody, clock: Clock, db: psycopg.Connection) -> None:
    start(c, 1, Policy(backoff=Exponential("10s")))
    c.claim(TOPIC, GROUP).nack()
    run_at = db.execute("SELECT run_at FROM custody.deliveries").fetchone()
    assert run_at == (clock.time + timedelta(seconds=10),)


def test_messages_across_segments_are_claimed_in_one_lease(c: Custody, db: psycopg.Connection, clock: Clock) -> None:
    start(c, policy=Policy(ordering="key", backoff=Constant("1s")))
    for n in range(4):
        keyed(c, [f"k{n}", "shared"])
        db.execute("SELECT custody.seal_segment(%s)", [TOPIC])
    lease = c.claim(TOPIC, GROUP, max_messages=100)
    assert [m.key for m in lease] == ["k0", "shared", "k1", "shared", "k2", "shared", "k3", "shared"]
    assert lease.nack(lease.messages[1]).released == (3, 5, 7)
    lease.ack()
    clock.move(1)
    assert offsets(drain(c)) == [1, 3, 5, 7]


@pytest.mark.req("G4", "C4")
def test_a_claim_that_ends_by_its_bytes_leaves_other_leases_alone(c: Custody, db: Any, clock: Clock) -> None:
    start(c, 9, Policy(max_attempts=1))
    assert offsets(c.claim(TOPIC, GROUP, max_messages=2)) == [0, 1]
    rows = db.execute(
        'SELECT "offset" FROM custody.claim(%s, %s, 3, p_bytes => 1, p_now => %s) WHERE "offset" IS NOT NULL',
        [TOPIC, GROUP, clock()],
    ).fetchall()
    assert rows == [(2,)]
    assert c.stats(TOPIC, GROUP).in_flight == 3
    clock.move(31)
    assert c.claim(TOPIC, GROUP, max_messages=9)
    dead = [letter.offset for letter in c.dead(TOPIC, GROUP)]
    assert dead == [2], "only the message that was alone in its lease is charged"


@pytest.mark.req("C6")
def test_a_partition_with_nothing_but_live_leases_is_no_candidate(c: Custody, db: psycopg.Connection[Any]) -> None:
    """Whoever is at it does not make another claim busy: that one has nothing to take there."""
    c.create_topic(TOPIC, partitions=2)
    fill(c, 1)
    c.create_group(TOPIC, GROUP)
    assert c.claim(TOPIC, GROUP)
    with db.transaction():
        db.execute("SELECT FROM custody.cursors FOR UPDATE")
        assert c.claim(TOPIC, GROUP).reason == "empty"
