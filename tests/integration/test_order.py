"""Order by key: a failure holds back its own key and nothing else, through every later failure, expiry and repair."""

from __future__ import annotations

import threading
from collections import defaultdict

import psycopg
import pytest
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, keyed, offsets, start
from tests.order_rule import audit

import custody
from custody import Constant, Custody, Message, Outcome, Policy
from custody.errors import GroupNotFound, NotSkippable, PartitionNotFound
from custody.model.lifecycle import MessageState
from custody.verbs.pipelines import BatchReport

pytestmark = pytest.mark.core

BY_KEY = Policy(ordering="key", max_attempts=3, backoff=Constant("10s"))
HOLD = Policy(ordering="key", max_attempts=1, on_dead="hold")


def by_key(messages: list[Message]) -> dict[str | None, list[int]]:
    found = defaultdict(list)
    for message in messages:
        found[message.key].append(message.offset)
    return dict(found)


@pytest.mark.req("K1")
def test_a_failure_in_the_middle_of_a_batch_holds_back_only_its_key(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="abcabcabc")
    lease = c.claim(TOPIC, GROUP, max_messages=9)
    lease.ack(lease.messages[:3])
    settled = lease.nack(lease.messages[3], error="no")
    assert settled.released == (6,), "the rest of the key leaves the lease with it"
    assert lease.ack().settled == 4
    keyed(c, "abc")
    assert [m.key for m in drain(c)] == ["b", "c"], "other keys go on during the backoff"
    clock.move(10)
    assert [(m.offset, m.attempt) for m in drain(c)] == [(3, 2), (6, 1), (9, 1)]


@pytest.mark.req("K1")
def test_other_keys_are_not_delayed_by_a_claim_of_one(c: Custody) -> None:
    start(c, policy=BY_KEY, keys="a" * 10 + "b" * 3)
    lease = c.claim(TOPIC, GROUP)
    lease.nack()
    assert offsets(c.claim(TOPIC, GROUP)) == [10]


@pytest.mark.req("K2")
def test_order_holds_through_the_second_and_every_later_failure(c: Custody, clock: Clock) -> None:
    start(c, policy=Policy(ordering="key", max_attempts=9, backoff=Constant("10s")), keys="aaabbb")
    done: list[Message] = []
    failures = {0: 3, 1: 2, 4: 4}
    for _ in range(200):
        lease = c.claim(TOPIC, GROUP, max_messages=3)
        outcomes: dict[int, Outcome] = {}
        stopped: set[str | None] = set()
        for message in lease:
            if message.key in stopped:
                continue
            if failures.get(message.offset, 0):
                failures[message.offset] -= 1
                outcomes[message.offset] = Outcome("nack")
                stopped.add(message.key)
            else:
                outcomes[message.offset] = Outcome("ack")
                done.append(message)
        if lease:
            c.settle(lease.lease_id, outcomes)
        else:
            clock.move(5)
    assert by_key(done) == {"a": [0, 1, 2], "b": [3, 4, 5]}
    assert {m.offset: m.attempt for m in done} == {0: 4, 1: 3, 2: 1, 3: 1, 4: 5, 5: 1}


@pytest.mark.req("K3")
def test_the_failure_and_the_block_are_one_row_in_one_transaction(c: Custody, db: psycopg.Connection) -> None:
    start(c, policy=BY_KEY, keys="ab")
    lease = c.claim(TOPIC, GROUP)
    lease.nack()
    tables = everything(db)
    assert len(tables["cases"]) == 1
    assert all(tables[name] == [] for name in ("leases", "returned", "parked", "freed", "awaited"))
    assert db.execute("SELECT count(*) FROM custody.blocked_keys").fetchone() == (1,)


@pytest.mark.req("K4")
def test_after_two_failures_one_success_does_not_end_the_block(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aaa")
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    lease.nack(lease.messages)
    clock.move(10)
    first = c.claim(TOPIC, GROUP)
    assert offsets(first) == [0]
    assert not c.claim(TOPIC, GROUP), "the second one waits for the first"
    first.ack()
    second = c.claim(TOPIC, GROUP)
    assert offsets(second) == [1]
    assert not c.claim(TOPIC, GROUP), "the third one was never tried, and still waits"
    second.ack()
    assert offsets(c.claim(TOPIC, GROUP)) == [2]


@pytest.mark.req("K4")
def test_the_block_ends_exactly_with_the_last_earlier_message(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aaaa")
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.nack(lease.messages)
    clock.move(10)
    again = c.claim(TOPIC, GROUP, max_messages=10)
    taken = offsets(again)
    assert taken == list(range(len(taken))), "in order, and what is in the same lease may come along"
    again.ack()
    assert taken + offsets(drain(c)) == [0, 1, 2, 3]


@pytest.mark.req("K2")
def test_retries_of_a_key_follow_each_other_in_one_lease_up_to_one_that_is_not_due(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aaaa")
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    c.settle(lease.lease_id, {n: Outcome("nack", delay=50 if n == 2 else 10) for n in range(4)})
    clock.move(10)
    again = c.claim(TOPIC, GROUP, max_messages=9)
    assert [(m.offset, m.attempt) for m in again] == [(0, 2), (1, 2)]
    assert not c.claim(TOPIC, GROUP, max_messages=9)
    again.ack()
    assert not c.claim(TOPIC, GROUP, max_messages=9), "the third one waits, and the fourth one behind it"
    clock.move(40)
    assert [(m.offset, m.attempt) for m in c.claim(TOPIC, GROUP, max_messages=9)] == [(2, 2), (3, 2)]


@pytest.mark.req("K2")
def test_retries_of_a_key_follow_each_other_up_to_one_that_was_never_delivered(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aaaaa")
    lease = c.claim(TOPIC, GROUP, max_messages=5)
    c.settle(lease.lease_id, {n: Outcome("nack") for n in (0, 1, 3, 4)})  # 2 is parked
    clock.move(10)
    leases = []
    while again := c.claim(TOPIC, GROUP, max_messages=9):
        leases.append(offsets(again))
        again.ack()
    assert leases == [[0, 1], [2], [3, 4]]


@pytest.mark.req("K2", "K8")
def test_retries_of_a_key_follow_each_other_up_to_one_that_holds_it(c: Custody, clock: Clock) -> None:
    start(c, policy=Policy(ordering="key", max_attempts=3, on_dead="hold", backoff=Constant("10s")), keys="aaaa")
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    c.settle(lease.lease_id, {n: Outcome("dead" if n == 2 else "nack") for n in range(4)})
    clock.move(10)
    assert offsets(drain(c)) == [0, 1]
    assert c.release_key(TOPIC, GROUP, "a") == 1
    assert offsets(drain(c)) == [3]


@pytest.mark.req("K2", "N10")
def test_retries_that_follow_take_turns_with_other_keys_and_half_of_a_lease(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aaabbb")
    lease = c.claim(TOPIC, GROUP, max_messages=6)
    lease.nack(lease.messages)
    keyed(c, "ccccc")
    clock.move(10)
    first = c.claim(TOPIC, GROUP, max_messages=8)
    assert offsets(first) == [0, 1, 3, 4, 6, 7, 8, 9], "the first of each key, then the second ones, then fresh ones"
    assert first.nack(first.messages[0]).released == (1,)
    first.ack()
    assert [(m.offset, m.attempt) for m in drain(c)] == [(5, 2), (10, 1)]
    clock.move(10)
    assert [(m.offset, m.attempt) for m in c.claim(TOPIC, GROUP, max_messages=8)] == [(0, 3), (1, 2), (2, 2)]


@pytest.mark.req("K2", "N10")
@pytest.mark.parametrize("driven", [False, True])
def test_what_came_back_and_is_parked_one_by_one_goes_on_in_few_leases(
    c: Custody, db: psycopg.Connection, clock: Clock, driven: bool
) -> None:
    """Delivered before, each of them is a case; a key with many of them must not need a lease for each."""
    policy = Policy(ordering="key", max_attempts=9, backoff=Constant("10s"))
    start(c, policy=policy, keys=[f"k{n % 40}" for n in range(3000)])
    drive = c.drive(TOPIC, GROUP)[0]
    failures = {n for n in range(1000, 2000) if n % 97 == 0}

    def batch() -> int:
        """A batch in which each key stops at its first failure; how many messages it had."""
        if driven:
            claim = drive.claim(1000)
            taken = [o for part in drive.claimed(claim.number or 0) for span in part.ranges for o in range(*span)]
        else:
            lease = c.claim(TOPIC, GROUP, max_messages=1000)
            taken = offsets(lease)
        stopped: dict[int, int] = {}
        for offset in failures.intersection(taken):
            stopped[offset % 40] = min(offset, stopped.get(offset % 40, offset))
        failures.difference_update(stopped.values())
        if driven and claim.number:
            drive.commit(
                claim.number, BatchReport(failed={(0, offset): Outcome("nack") for offset in stopped.values()})
            )
        elif taken:
            done = dict.fromkeys((o for o in taken if o < stopped.get(o % 40, 3000)), Outcome("ack"))
            c.settle(lease.lease_id, done | dict.fromkeys(stopped.values(), Outcome("nack")))
        return len(taken)

    assert batch() == 1000
    if driven:
        drive.claim(1000)
    else:
        c.claim(TOPIC, GROUP, max_messages=1000)
    clock.move(30)
    before = 0
    while batch():
        before += 1
    assert before <= (2 if driven else 12), "what a worker lost comes back in pieces, what a driver lost does not"
    assert c.stats(TOPIC, GROUP).parked > 300
    clock.move(10)
    after = 0
    while batch():
        after += 1
    assert after <= 8, "a key that has failed comes back with 4, 8, 16 messages"
    assert c.stats(TOPIC, GROUP).depth == 0
    verdict = audit(db, TOPIC, GROUP)
    assert verdict.violations == []
    assert verdict.count(MessageState.DONE) == 3000


@pytest.mark.req("K1")
def test_a_later_failure_that_is_due_first_does_not_hide_other_keys(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aab")
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    c.settle(lease.lease_id, {0: Outcome("nack", delay=100), 1: Outcome("nack", delay=1), 2: Outcome("nack", delay=2)})
    clock.move(3)
    other = c.claim(TOPIC, GROUP)
    assert offsets(other) == [2]
    other.ack()
    clock.move(97)
    assert offsets(drain(c)) == [0, 1]


@pytest.mark.req("K2")
def test_a_message_in_flight_blocks_its_key_for_other_claims(c: Custody) -> None:
    start(c, policy=BY_KEY, keys="ababab")
    first = c.claim(TOPIC, GROUP)
    second = c.claim(TOPIC, GROUP, max_messages=9)
    assert (offsets(first), offsets(second)) == ([0], [1, 3, 5])
    assert not c.claim(TOPIC, GROUP)
    second.ack()
    assert not c.claim(TOPIC, GROUP)
    first.ack()
    assert offsets(c.claim(TOPIC, GROUP, max_messages=9)) == [2, 4]


@pytest.mark.req("K2", "C4")
def test_an_expired_batch_of_many_keys_keeps_the_order_of_each(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys=[f"k{n % 7}" for n in range(100)])
    c.claim(TOPIC, GROUP, max_messages=60)
    keyed(c, [f"k{n % 7}" for n in range(20)])
    clock.move(30)
    seen = by_key(drain(c, max_messages=13))
    assert all(found == sorted(found) for found in seen.values())
    assert sorted(offset for found in seen.values() for offset in found) == list(range(120))


@pytest.mark.req("K2")
def test_release_and_later_keep_the_order_too(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aabb")
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    assert lease.release(lease.messages[0]).released == (1,)
    assert lease.later(lease.messages[2], after="5s").released == (3,)
    assert [(m.offset, m.attempt) for m in drain(c)] == [(0, 1), (1, 1)]
    clock.move(5)
    assert [(m.offset, m.attempt) for m in drain(c)] == [(2, 1), (3, 1)]


@pytest.mark.req("K2")
def test_extending_a_later_message_does_not_let_it_overtake(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aab")
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.extend("2m", message=lease.messages[1])
    clock.move(30)
    assert offsets(c.claim(TOPIC, GROUP, max_messages=9)) == [2], "the earlier one of the key was extended with it"
    assert lease.ack(lease.messages[:2]).settled == 2


@pytest.mark.req("K2")
def test_a_null_key_is_never_ordered(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys=[None, None, "a", None])
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    assert lease.nack(lease.messages[0]).released == ()
    assert lease.ack(lease.messages[3]).settled == 1
    lease.ack()
    keyed(c, [None, "a"])
    assert offsets(drain(c)) == [4, 5]
    clock.move(10)
    assert offsets(drain(c)) == [0]
    assert c.blocked_keys(TOPIC, GROUP) == []


def test_an_empty_key_is_a_key_like_any_other(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys=["", "a", ""])
    c.claim(TOPIC, GROUP).nack()
    assert offsets(drain(c)) == [1]
    clock.move(10)
    assert offsets(drain(c)) == [0, 2]


@pytest.mark.req("K8")
def test_a_dead_message_releases_its_key_by_default(c: Custody) -> None:
    start(c, policy=Policy(ordering="key", max_attempts=1), keys="aab")
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    settled = lease.nack(lease.messages[0])
    assert (settled.dead, settled.released) == ((0,), (1,))
    lease.ack()
    assert [(m.offset, m.attempt) for m in drain(c)] == [(1, 1)]
    assert c.blocked_keys(TOPIC, GROUP) == []


@pytest.mark.req("K8")
def test_a_rejected_message_lets_the_rest_of_its_key_go_on_in_the_lease(c: Custody) -> None:
    start(c, policy=BY_KEY, keys="aa")
    lease = c.claim(TOPIC, GROUP, max_messages=2)
    settled = c.settle(lease.lease_id, {0: Outcome("dead", error="no"), 1: Outcome("ack")})
    assert (settled.settled, settled.dead, settled.released) == (2, (0,), ())


@pytest.mark.req("K8")
def test_a_held_dead_message_keeps_its_key_until_it_is_released(c: Custody, clock: Clock) -> None:
    start(c, policy=HOLD, keys="aabaa")
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    assert lease.nack(lease.messages[0], error="poison").released == (1,)
    lease.ack()
    clock.move(86400)
    assert not c.claim(TOPIC, GROUP)
    (blocked,) = c.blocked_keys(TOPIC, GROUP)
    assert (blocked.partition, blocked.key, blocked.blocked_by, blocked.why) == (0, "a", 0, "held")
    assert (blocked.attempts, blocked.last_error, blocked.parked) == (1, "poison", 3)
    assert [(letter.offset, letter.held) for letter in c.dead(TOPIC, GROUP)] == [(0, True)]
    assert c.release_key(TOPIC, GROUP, "a", reason="looked at it") == 1
    assert offsets(drain(c)) == [1, 3, 4]
    assert [(letter.offset, letter.held) for letter in c.dead(TOPIC, GROUP)] == [(0, False)]
    assert c.blocked_keys(TOPIC, GROUP) == []
    (entry,) = (entry for entry in c.trace(TOPIC, 0, 0) if entry.kind == "free")
    assert (entry.worker, entry.error) == ("test", "looked at it")


@pytest.mark.req("K8")
def test_releasing_a_key_that_is_not_held_is_nothing(c: Custody, db: psycopg.Connection) -> None:
    start(c, policy=HOLD, keys="a")
    before = everything(db)
    assert c.release_key(TOPIC, GROUP, "a") == 0
    assert c.release_key(TOPIC, GROUP, "nobody") == 0
    with pytest.raises(GroupNotFound):
        c.release_key(TOPIC, "nobody", "a")
    assert everything(db) == before


@pytest.mark.req("K8")
def test_skipping_a_dead_message_frees_its_key(c: Custody) -> None:
    start(c, policy=HOLD, keys="aa")
    c.claim(TOPIC, GROUP).nack()
    c.skip(TOPIC, GROUP, 0, 0, reason="a test order")
    assert c.dead(TOPIC, GROUP) == []
    assert offsets(drain(c)) == [1]
    skipped = c.trace(TOPIC, 0, 0)[-1]
    assert (skipped.kind, skipped.worker, skipped.error) == ("skip", "test", "a test order")


@pytest.mark.req("K8")
def test_any_waiting_message_can_be_skipped(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aaab" + "c" * 12)
    lease = c.claim(TOPIC, GROUP, max_messages=4)
    lease.nack(lease.messages[0])  # waits for its backoff; 1 and 2 are parked
    lease.release(lease.messages[3])  # came back in bulk
    c.skip(TOPIC, GROUP, 0, 3)
    c.skip(TOPIC, GROUP, 0, 1)
    c.skip(TOPIC, GROUP, 0, 0)
    late = c.claim(TOPIC, GROUP, max_messages=20)
    assert offsets(late) == [2, *range(4, 16)]
    clock.move(30)
    c.skip(TOPIC, GROUP, 0, 15)  # its lease has expired, though nobody has claimed since
    assert 15 not in offsets(drain(c))
    assert c.stats(TOPIC, GROUP).depth == 0


@pytest.mark.req("K8")
def test_what_is_done_in_flight_or_not_reached_cannot_be_skipped(c: Custody, db: psycopg.Connection) -> None:
    start(c, policy=BY_KEY, keys="abc")
    c.claim(TOPIC, GROUP).ack()
    c.claim(TOPIC, GROUP)
    before = everything(db)
    for offset, why in ((0, "done already"), (1, "in flight"), (2, "not been reached"), (99, "not been reached")):
        with pytest.raises(NotSkippable, match=why):
            c.skip(TOPIC, GROUP, 0, offset)
    with pytest.raises(PartitionNotFound):
        c.skip(TOPIC, GROUP, 1, 0)
    assert everything(db) == before


@pytest.mark.req("K8")
def test_blocked_keys_say_why(c: Custody, clock: Clock) -> None:
    start(c, policy=HOLD, keys="hhbbrrff")
    c.update_group(TOPIC, GROUP, Policy(ordering="key", max_attempts=2, on_dead="hold", backoff=Constant("10s")))
    lease = c.claim(TOPIC, GROUP, max_messages=8)
    h, b, r = lease.messages[0], lease.messages[2], lease.messages[4]
    lease.nack(h, requeue=False)
    lease.nack(r, delay=0)
    lease.nack(b)
    lease.release()
    retrying = c.claim(TOPIC, GROUP)
    while retrying.messages[0].key != "r":
        retrying = c.claim(TOPIC, GROUP)
    in_flight = c.claim(TOPIC, GROUP)
    found = {blocked.key: blocked for blocked in c.blocked_keys(TOPIC, GROUP)}
    assert {key: blocked.why for key, blocked in found.items() if key in "hbr"} == {
        "h": "held",
        "b": "backoff",
        "r": "retrying",
    }
    assert found["b"].run_at is not None
    assert found["b"].run_at.timestamp() == clock.time.timestamp() + 10
    assert not in_flight or in_flight.messages[0].key == "f"
    assert len(c.blocked_keys(TOPIC, GROUP, limit=1)) == 1


@pytest.mark.req("K2", "V8")
def test_a_redriven_message_waits_for_earlier_ones_and_is_waited_for(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="aaa")
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    c.settle(lease.lease_id, {0: Outcome("nack"), 1: Outcome("nack"), 2: Outcome("nack")})
    clock.move(10)
    first = c.claim(TOPIC, GROUP)
    first.nack(requeue=False)  # 0 is dead; the key goes on with 1
    second = c.claim(TOPIC, GROUP)
    assert offsets(second) == [1]
    c.redrive(TOPIC, GROUP)
    assert not c.claim(TOPIC, GROUP), "a message of the key is in flight"
    second.ack()
    third = c.claim(TOPIC, GROUP)
    assert (offsets(third), third.messages[0].attempt) == ([0], 1), "the redriven one is the earliest now"
    assert not c.claim(TOPIC, GROUP)
    third.ack()
    assert offsets(drain(c)) == [2]


@pytest.mark.req("K2", "V9")
def test_a_rewound_key_is_delivered_again_in_order(c: Custody, clock: Clock) -> None:
    start(c, policy=BY_KEY, keys="ababab")
    lease = c.claim(TOPIC, GROUP, max_messages=6)
    lease.nack(lease.messages[2])
    lease.ack()
    c.rewind(TOPIC, GROUP, to_offset=1)
    again = drain(c, max_messages=2)
    assert by_key(again) == {"b": [1, 3, 5], "a": [2, 4]}
    assert c.stats(TOPIC, GROUP).depth == 0


@pytest.mark.req("K2", "V9")
def test_a_rewound_message_waits_for_one_of_its_key_in_flight_below(c: Custody) -> None:
    start(c, policy=BY_KEY, keys="aabb")
    below = c.claim(TOPIC, GROUP)
    drain(c)
    c.rewind(TOPIC, GROUP, to_offset=1)
    assert offsets(drain(c)) == [2, 3]
    below.ack()
    assert offsets(drain(c)) == [1]


@pytest.mark.req("K1", "N10")
def test_a_hot_key_with_a_long_tail_does_not_delay_the_others(c: Custody, clock: Clock) -> None:
    followers = 5000
    start(c, policy=BY_KEY, keys=["hot", *(("hot",) * 9 + ("cold",)) * (followers // 9)])
    c.claim(TOPIC, GROUP).nack(error="down")
    cold = [n for n in range(1, 1 + followers // 9 * 10) if n % 10 == 0]
    claims = 0
    seen: list[int] = []
    while len(seen) < len(cold):
        lease = c.claim(TOPIC, GROUP, max_messages=50)
        claims += 1
        assert {m.key for m in lease} <= {"cold"}
        assert claims < 50
        if lease:
            seen += offsets(lease)
            lease.ack()
    assert seen == cold
    stats = c.stats(TOPIC, GROUP)
    assert (stats.parked, stats.lag, stats.waiting) == (followers // 9 * 9, 0, 1)
    clock.move(10)
    first = c.claim(TOPIC, GROUP)
    assert (offsets(first), first.messages[0].attempt) == ([0], 2)
    first.ack()
    keyed(c, ["cold"] * 20)
    tail: list[Message] = []
    others: list[int] = []
    while lease := c.claim(TOPIC, GROUP, max_messages=500):
        tail += [m for m in lease if m.key == "hot"]
        others += [len(tail) for m in lease if m.key == "cold"]
        lease.ack()
    assert offsets(tail) == sorted(offsets(tail))
    assert len(tail) == followers // 9 * 9
    assert {m.attempt for m in tail} == {1}
    assert len(others) == 20
    assert max(others) <= 500, "fresh messages of other keys came with the first of the tail"


@pytest.mark.req("K5", "K6", "K7")
def test_a_new_worker_never_runs_a_blocked_key_from_its_first_claim_on(
    c: Custody, clock: Clock, database_url: str
) -> None:
    start(c, policy=BY_KEY, keys=["a", *("ab" * 500)])
    c.claim(TOPIC, GROUP).nack()
    with custody.connect(database_url, worker="new", clock=clock) as new:
        lease = new.claim(TOPIC, GROUP, max_messages=10)
        assert {m.key for m in lease} == {"b"}
        assert c.stats(TOPIC, GROUP).parked <= 40, "and it read no more than it needed"


@pytest.mark.req("K2", "K7")
def test_many_workers_on_one_partition_keep_the_order_of_every_key(database_url: str) -> None:
    with custody.connect(database_url, pool_size=8) as c:
        policy = Policy(ordering="key", max_attempts=99, backoff=Constant(0))
        start(c, policy=policy, keys=[f"k{n % 20}" for n in range(300)])
        done: list[tuple[str | None, int]] = []
        lock = threading.Lock()

        def work(seed: int) -> None:
            turn = seed
            while c.stats(TOPIC, GROUP).depth:
                lease = c.claim(TOPIC, GROUP, max_messages=7)
                for message in lease:
                    turn += 1
                    if message.attempt < 3 and (message.offset + turn) % 5 == 0:
                        lease.nack(message)
                        lease.release([m for m in lease if m.offset > message.offset and m.key != message.key])
                        break
                    with lock:
                        done.append((message.key, message.offset))
                    lease.ack(message)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    found = defaultdict(list)
    for key, offset in done:
        found[key].append(offset)
    assert all(each == sorted(each) for each in found.values())
    assert sorted(offset for _, offset in done) == list(range(300))
