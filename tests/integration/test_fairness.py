"""Fairness: a key or tenant that floods a partition delays the others by no more than twice their share."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, Literal

import psycopg
import pytest
from tests import extent
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, keyed, offsets, start
from tests.order_rule import audit

from custody import Constant, Custody, Message, Outgoing, Policy
from custody.model.lifecycle import MessageState

pytestmark = [pytest.mark.core, pytest.mark.req("N10")]

FAIR = Policy(ordering="key", fairness="key")
BY_TENANT = Policy(ordering="key", fairness="tenant")
LIGHT = [f"k{n % 10}" for n in range(30)]
FLOOD = extent.size(600, 1500)


def tenant(key: str) -> str:
    return key.split(":")[0]


def ideal(keys: Iterable[str], of: Any = str) -> dict[int, int]:
    """When each message would be handled by a queue for each key (or tenant), served in turn: offset → position."""
    queues: dict[str, deque[int]] = {}
    for offset, key in enumerate(keys):
        queues.setdefault(of(key), deque()).append(offset)
    position, handled = {}, 0
    while queues:
        for name in list(queues):
            handled += 1
            position[queues[name].popleft()] = handled
            if not queues[name]:
                del queues[name]
    return position


def assert_in_time(c: Custody, size: int, latest: dict[int, int]) -> None:
    """One worker, so many messages with each claim: each offset is handled at its latest position or before."""
    position: dict[int, int] = {}
    while len(position) < max(latest.values()) and (lease := c.claim(TOPIC, GROUP, max_messages=size)):
        for message in lease:
            position[message.offset] = len(position) + 1
        lease.ack()
    late = {offset: (position.get(offset), limit) for offset, limit in latest.items()}
    late = {offset: (at, limit) for offset, (at, limit) in late.items() if at is None or at > limit}
    assert not late, f"offset: (handled as number, at the latest): {late}"


@pytest.mark.parametrize("size", [1, 7, 50])
@pytest.mark.parametrize("where", ["behind", "between", "before"])
def test_a_flood_delays_the_others_by_no_more_than_twice_their_share(c: Custody, size: int, where: str) -> None:
    flood = ["F"] * FLOOD
    keys = [*flood, *LIGHT] if where == "behind" else [*LIGHT, *flood]
    if where == "between":
        each = FLOOD // 30
        keys = [key for n in range(30) for key in (*flood[:each], LIGHT[n])]
    start(c, policy=FAIR, keys=keys)
    best = ideal(keys)
    assert_in_time(c, size, {n: 2 * best[n] + size for n, key in enumerate(keys) if key != "F"})


def test_without_fairness_the_others_wait_for_the_whole_flood(c: Custody) -> None:
    start(c, policy=Policy(ordering="key"), keys=["F"] * 500 + LIGHT)
    assert "F" in {message.key for message in drain(c)[400:500]}


@pytest.mark.parametrize("size", [1, 7, 50])
def test_a_tenant_with_many_keys_is_one(c: Custody, size: int) -> None:
    keys = [f"big:{n}" for n in range(extent.size(200, 600))] + [f"small{n % 4}:{n}" for n in range(20)]
    start(c, policy=BY_TENANT, keys=keys)
    best = ideal(keys, tenant)
    assert_in_time(c, size, {n: 2 * best[n] + size for n, key in enumerate(keys) if tenant(key) != "big"})


def test_the_separator_is_the_policys(c: Custody) -> None:
    policy = Policy(ordering="key", fairness="tenant", tenant_separator="/")
    start(c, policy=policy, keys=[f"a/{n}" for n in range(100)] + ["b/0", "c/0"])
    first = c.claim(TOPIC, GROUP, max_messages=10)
    assert {"b/0", "c/0"} <= {message.key for message in first}


def test_who_comes_later_does_not_wait_for_what_is_parked(c: Custody) -> None:
    start(c, policy=FAIR, keys=["F"] * 1000)
    for _ in range(3):
        lease = c.claim(TOPIC, GROUP, max_messages=10)
        assert len(lease) == 10  # nobody else: all of it is F's
        lease.ack()
    keyed(c, ["late", "F", "later"])
    lease = c.claim(TOPIC, GROUP, max_messages=10)
    assert {"late", "later"} <= {message.key for message in lease}
    assert len(lease) == 10


def test_a_flood_alone_fills_its_leases(c: Custody) -> None:
    start(c, policy=FAIR, keys=["F"] * 1000)
    sizes = []
    while lease := c.claim(TOPIC, GROUP, max_messages=100):
        sizes.append(len(lease))
        lease.ack()
    assert sizes == [100] * 10


def test_the_same_of_each_key(c: Custody) -> None:
    start(c, policy=FAIR, keys=["a"] * 300 + ["b"] * 300 + ["c"] * 5)
    assert Counter(message.key for message in c.claim(TOPIC, GROUP, max_messages=20)) == {"a": 8, "b": 7, "c": 5}


@pytest.mark.parametrize("fairness", ["key", "tenant"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_order_and_completeness_under_failures(
    c: Custody, db: psycopg.Connection[Any], clock: Clock, fairness: Literal["key", "tenant"], seed: int
) -> None:
    """Several leases at once, failures, releases, expired leases: each key in order, and nothing is stuck or lost."""
    dice = random.Random(seed)
    names = ["F"] * 30 + [f"t{n}:{m}" for n in range(4) for m in range(3)]
    policy = Policy(ordering="key", fairness=fairness, max_attempts=50, backoff=Constant("1s"), max_ack_holes=None)
    start(c, policy=policy, keys=[dice.choice(names) for _ in range(300)])
    held: list[Any] = []
    for turn in range(120):
        if turn % 10 == 0:
            keyed(c, [dice.choice([*names, None]) for _ in range(20)])
        if lease := c.claim(TOPIC, GROUP, max_messages=dice.choice((1, 5, 20)), visibility_timeout="60s"):
            held.append(lease)
        if len(held) > 3 or not lease:
            clock.move(1)
            for one in held:
                dice.choice((one.ack, one.ack, one.nack, one.release, lambda: clock.move(100)))()
                if clock() >= one.deadline:
                    break
            held.clear()
    clock.move(1000)
    drain(c, max_messages=50)
    result = audit(db, TOPIC, GROUP)
    assert result.violations == []
    assert set(result.states.values()) == {MessageState.DONE}
    assert c.stats(TOPIC, GROUP).depth == 0
    assert db.execute("SELECT count(*) FROM custody.parked").fetchone() == (0,)


@pytest.mark.req("G13")
def test_no_more_is_parked_than_the_cap_allows(c: Custody) -> None:
    policy = Policy(ordering="key", fairness="key", max_parked=40)
    start(c, policy=policy, keys=["F"] * 500 + LIGHT)
    seen: list[Message] = []
    while lease := c.claim(TOPIC, GROUP, max_messages=10):
        assert c.stats(TOPIC, GROUP).parked <= 40
        seen += lease
        lease.ack()
    assert sorted(offsets(seen)) == list(range(530))


@pytest.mark.req("G13")
def test_a_full_cap_is_the_reason_only_if_nothing_else_can_be_given(c: Custody) -> None:
    start(c, policy=Policy(ordering="key", fairness="key", max_parked=5), keys=["F"] * 20 + ["a", "F"])
    held = c.claim(TOPIC, GROUP, max_messages=2)
    assert offsets(held) == [0, 1]  # to come to another key it would have to park more
    assert c.stats(TOPIC, GROUP).parked == 4
    assert c.claim(TOPIC, GROUP, max_messages=2).reason == "busy"  # parks what it may
    assert c.stats(TOPIC, GROUP).parked == 5
    refused = c.claim(TOPIC, GROUP, max_messages=2)
    assert (len(refused), refused.reason) == (0, "max_parked")
    held.ack()
    assert len(drain(c, max_messages=2)) == 20


def test_a_cap_on_what_is_in_flight_counts_what_was_parked(c: Custody) -> None:
    start(c, policy=Policy(ordering="key", fairness="key", max_in_flight=6), keys="F" * 50 + "abcdefghijklmnopqrst")
    held = [lease for _ in range(4) if (lease := c.claim(TOPIC, GROUP, max_messages=4))]
    assert sum(map(len, held)) <= 6
    assert c.claim(TOPIC, GROUP, max_messages=4).reason == "max_in_flight"
    for lease in held:
        lease.ack()
    assert len(drain(c)) == 70 - sum(map(len, held))


def test_messages_without_a_key_go_as_they_come(c: Custody) -> None:
    keys = ["F"] * 100 + [None] * 50 + ["a", "b"]
    start(c, policy=FAIR, keys=keys)
    seen = drain(c, max_messages=10)
    assert sorted(offsets(seen)) == list(range(152))
    nobody = [message.offset for message in seen if message.key is None]
    assert nobody == sorted(nobody)


def test_fairness_can_be_turned_on_and_off_while_messages_are_parked(c: Custody, db: psycopg.Connection[Any]) -> None:
    start(c, policy=Policy(ordering="key"), keys="aaabbb" * 10)
    held = c.claim(TOPIC, GROUP, max_messages=1)
    c.claim(TOPIC, GROUP, max_messages=5).ack()  # parks messages of a
    for policy in (BY_TENANT, Policy(ordering="key"), FAIR):
        c.update_group(TOPIC, GROUP, policy)
        found = c.group(TOPIC, GROUP).policy
        assert found is not None
        assert found.fairness == policy.fairness
        c.claim(TOPIC, GROUP, max_messages=3).ack()
    held.ack()
    drain(c)
    result = audit(db, TOPIC, GROUP)
    assert result.violations == []
    assert result.count(MessageState.DONE) == 60


@pytest.mark.parametrize(
    ("have", "room", "expected"),
    [
        ([5, 1, 1], 7, [5, 1, 1]),
        ([5, 1, 1], 4, [2, 1, 1]),
        ([9, 9, 9], 10, [4, 3, 3]),
        ([9, 9, 9], 2, [1, 1, 0]),
        ([1, 2, 3, 4], 8, [1, 2, 3, 2]),
        ([3], 0, [0]),
        ([3], 9, [3]),
    ],
)
def test_shares(db: psycopg.Connection[Any], have: list[int], room: int, expected: list[int]) -> None:
    row = db.execute("SELECT custody.fair_shares(%s::bigint[], %s)", [have, room]).fetchone()
    assert row is not None
    assert sum(row[0]) == min(room, sum(have))
    assert sorted(row[0]) == sorted(expected)
    assert row[0] == expected


@pytest.mark.req("S4")
def test_a_pipelines_claim_is_fair_too(c: Custody) -> None:
    start(c, policy=FAIR, keys=["F"] * 500 + LIGHT)
    drive, _ = c.drive(TOPIC, GROUP)
    claimed = drive.claim(60)
    assert claimed.number is not None
    (part,) = drive.claimed(claimed.number)
    assert part.messages == 60
    taken = {offset for first, last in part.ranges for offset in range(first, last)}
    assert set(range(500, 530)) <= taken


def test_one_message_for_each_of_many_keys_costs_no_parking(c: Custody, db: psycopg.Connection[Any]) -> None:
    start(c, policy=FAIR)
    c.publish_many(TOPIC, [Outgoing(n, key=f"k{n}") for n in range(500)])
    assert len(drain(c)) == 500
    assert db.execute("SELECT count(*) FROM custody.journal WHERE kind = 'park'").fetchone() == (0,)


def test_more_tenants_than_are_looked_at_by_name_have_their_turn_too(c: Custody) -> None:
    """Each has published its messages at once, so they are parked: the last ones by name go on with the others."""
    c.create_topic("jobs")
    c.create_group("jobs", "g", Policy(ordering="key", fairness="tenant", max_ack_holes=None))
    tenants, each = [f"t{n:04}" for n in range(1050)], extent.size(4, 8)
    c.publish_many("jobs", [Outgoing(n, key=f"{tenant}:k") for tenant in tenants for n in range(each)])
    served: Counter[str] = Counter()
    while served.total() < 0.6 * each * len(tenants):
        lease = c.claim("jobs", "g", max_messages=500)
        served.update(message.key.split(":")[0] for message in lease if message.key)
        lease.ack()
    last = sum(served[tenant] for tenant in tenants[1000:]) / 50
    assert last > 0.7 * served.total() / len(tenants)
