"""Groups: where they start, their policy, pause and resume, and bare ones, which are only a cursor."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from tests.conftest import Clock
from tests.integration.stream import GROUP, TOPIC, drain, everything, fill, offsets, start
from tests.unit.test_policy import policies

from custody import Constant, Custody, Exponential, Linear, Policy
from custody.errors import (
    BareGroup,
    GroupExists,
    GroupNotFound,
    InvalidArgument,
    InvalidPolicy,
    LifecycleGroup,
    OffsetOutOfRange,
    PartitionNotFound,
    TopicNotFound,
)

pytestmark = pytest.mark.core


@pytest.fixture
def orders(c: Custody, clock: Clock) -> Custody:
    """Ten messages on partition 0, a minute apart."""
    c.create_topic(TOPIC, partitions=2)
    for n in range(10):
        c.publish(TOPIC, n, partition=0)
        clock.move(60)
    return c


@pytest.mark.req("V9")
def test_a_new_group_starts_at_the_earliest_message(orders: Custody) -> None:
    orders.create_group(TOPIC, GROUP)
    assert offsets(drain(orders)) == list(range(10))


@pytest.mark.req("V9")
def test_a_group_may_start_after_the_latest_message(orders: Custody) -> None:
    orders.create_group(TOPIC, GROUP, start="latest")
    assert not orders.claim(TOPIC, GROUP)
    orders.publish(TOPIC, "new", partition=0)
    assert offsets(drain(orders)) == [10]


@pytest.mark.req("V9")
def test_a_group_may_start_at_an_offset(c: Custody) -> None:
    c.create_topic(TOPIC)
    fill(c, 10)
    c.create_group(TOPIC, GROUP, start=7)
    c.create_group(TOPIC, "end", start=10)
    assert offsets(drain(c)) == [7, 8, 9]
    assert not c.claim(TOPIC, "end")
    for outside in (-1, 11):
        with pytest.raises(OffsetOutOfRange, match="it goes from 0 to 10"):
            c.create_group(TOPIC, "outside", start=outside)
    with pytest.raises(GroupNotFound):
        c.group(TOPIC, "outside")


@pytest.mark.req("V9")
def test_a_group_may_start_at_a_time(orders: Custody, clock: Clock) -> None:
    orders.create_group(TOPIC, GROUP, start=clock.time - timedelta(minutes=3))
    assert offsets(drain(orders)) == [7, 8, 9]
    orders.create_group(TOPIC, "later", start=clock.time + timedelta(days=1))
    assert not orders.claim(TOPIC, "later")
    with pytest.raises(InvalidArgument, match="time zone"):
        orders.create_group(TOPIC, "naive", start=datetime(2030, 1, 1))


@pytest.mark.req("V9", "G20")
def test_another_start_is_refused(orders: Custody, db: psycopg.Connection) -> None:
    before = everything(db)
    wrong: list[Any] = ["beginning", "", True, None]
    for bad in wrong:
        with pytest.raises(InvalidArgument, match="Start at earliest, latest, an offset or a time"):
            orders.create_group(TOPIC, GROUP, start=bad)
    assert everything(db) == before


@pytest.mark.req("V1")
def test_groups_do_not_touch_one_another(c: Custody) -> None:
    start(c, 3)
    c.create_group(TOPIC, "other")
    c.claim(TOPIC, GROUP, max_messages=3).nack(requeue=False, error="no")
    assert [len(c.dead(TOPIC, group)) for group in (GROUP, "other")] == [3, 0]
    assert offsets(drain(c, group="other")) == [0, 1, 2]


@pytest.mark.req("G8")
def test_a_group_without_a_policy_has_the_defaults(orders: Custody, clock: Clock) -> None:
    group = orders.create_group(TOPIC, GROUP)
    assert (group.topic, group.name, group.bare, group.created_at) == (TOPIC, GROUP, False, clock.time)
    assert group.policy is not None
    assert group.policy.columns() == Policy().columns()
    assert orders.group(TOPIC, GROUP) == group


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(policy=policies)
def test_every_policy_comes_back_from_the_database(c: Custody, policy: Policy) -> None:
    if not c.topics():
        c.create_topic(TOPIC)
    stored = c.create_group(TOPIC, GROUP, policy).policy
    c.delete_group(TOPIC, GROUP)
    assert stored is not None
    assert stored.columns() == policy.columns()


def test_a_name_is_taken_once_in_its_topic(orders: Custody) -> None:
    orders.create_group(TOPIC, GROUP)
    with pytest.raises(GroupExists, match="'stock' already"):
        orders.create_group(TOPIC, GROUP)
    orders.create_topic("bills")
    orders.create_group("bills", GROUP)
    with pytest.raises(InvalidArgument):
        orders.create_group(TOPIC, "no spaces")
    with pytest.raises(TopicNotFound):
        orders.create_group("ordres", GROUP)


def test_groups_are_listed_by_name(orders: Custody) -> None:
    for name in ("b", "a"):
        orders.create_group(TOPIC, name)
    assert [group.name for group in orders.groups(TOPIC)] == ["a", "b"]
    with pytest.raises(TopicNotFound):
        orders.groups("ordres")


def test_a_new_policy_holds_from_now_on(c: Custody, clock: Clock) -> None:
    start(c, 3, Policy(backoff=Constant("10s")))
    c.claim(TOPIC, GROUP).nack()
    group = c.update_group(TOPIC, GROUP, Policy(max_attempts=2, backoff=Linear("1s"), visibility_timeout="5s"))
    assert group.policy is not None
    assert group.policy.max_attempts == 2
    assert c.claim(TOPIC, GROUP).deadline == clock.time + timedelta(seconds=5)
    clock.move(10)
    retry = c.claim(TOPIC, GROUP)
    assert (offsets(retry), retry.nack().dead) == ([0], (0,))


def test_the_ordering_of_a_group_stays(c: Custody, db: psycopg.Connection) -> None:
    start(c)
    before = everything(db)
    with pytest.raises(InvalidArgument, match="Create a second group"):
        c.update_group(TOPIC, GROUP, Policy(ordering="key"))
    with pytest.raises(GroupNotFound):
        c.update_group(TOPIC, "nobody", Policy())
    assert everything(db) == before


@pytest.mark.req("G8")
def test_an_unknown_key_of_a_policy_never_reaches_the_database() -> None:
    with pytest.raises(InvalidPolicy, match="Did you mean 'ordering'"):
        Policy.from_mapping({"order": "key"})
    with pytest.raises(TypeError):
        Policy(order="key")  # type: ignore[call-arg]


def test_a_deleted_group_is_gone_and_its_name_free(c: Custody, db: psycopg.Connection) -> None:
    start(c, 4)
    lease = c.claim(TOPIC, GROUP, max_messages=3)
    lease.nack(lease.messages[0])
    lease.release(lease.messages[1])
    c.delete_group(TOPIC, GROUP)
    with pytest.raises(GroupNotFound):
        c.claim(TOPIC, GROUP)
    tables = everything(db)
    assert all(tables[name] == [] for name in ("groups", "cursors", "frontiers", "leases", "returned", "cases"))
    c.create_group(TOPIC, GROUP)
    assert [(m.offset, m.attempt) for m in drain(c)] == [(n, 1) for n in range(4)]


@pytest.mark.req("N3")
def test_a_paused_group_hands_out_nothing_but_settles(c: Custody, clock: Clock) -> None:
    start(c, 3)
    lease = c.claim(TOPIC, GROUP)
    assert c.pause(TOPIC, GROUP, reason="the warehouse is closed")
    assert not c.pause(TOPIC, GROUP, reason="again")
    refused = c.claim(TOPIC, GROUP)
    assert (bool(refused), refused.reason, refused.detail) == (False, "paused", "the warehouse is closed")
    group = c.group(TOPIC, GROUP)
    assert (group.paused_at, group.paused_reason) == (clock.time, "the warehouse is closed")
    assert c.stats(TOPIC, GROUP).paused_reason == "the warehouse is closed"
    lease.ack()
    assert c.resume(TOPIC, GROUP)
    assert not c.resume(TOPIC, GROUP)
    assert offsets(c.claim(TOPIC, GROUP, max_messages=5)) == [1, 2]
    assert c.group(TOPIC, GROUP).paused_at is None


@pytest.mark.req("N3", "V3")
def test_pauses_and_policies_are_in_the_history(c: Custody, db: psycopg.Connection) -> None:
    start(c)
    c.pause(TOPIC, GROUP, reason="why")
    c.resume(TOPIC, GROUP)
    c.update_group(TOPIC, GROUP, Policy(backoff=Exponential("2s")))
    kinds = db.execute(
        "SELECT kind, worker, error FROM custody.history WHERE partition IS NULL ORDER BY entry"
    ).fetchall()
    assert kinds == [("pause", "test", "why"), ("resume", "test", None), ("policy", "test", None)]


@pytest.mark.req("V2")
def test_a_bare_group_fetches_and_commits_a_position(orders: Custody, db: psycopg.Connection) -> None:
    group = orders.create_group(TOPIC, "tail", bare=True)
    assert (group.bare, group.policy) == (True, None)
    assert offsets(orders.fetch(TOPIC, "tail", max_messages=4)) == [0, 1, 2, 3]
    assert offsets(orders.fetch(TOPIC, "tail", max_messages=2)) == [0, 1]
    orders.commit(TOPIC, "tail", 0, 4)
    assert offsets(orders.fetch(TOPIC, "tail")) == [4, 5, 6, 7, 8, 9]
    orders.commit(TOPIC, "tail", 0, 10)
    assert orders.fetch(TOPIC, "tail") == []
    orders.commit(TOPIC, "tail", 0, 3)
    assert offsets(orders.fetch(TOPIC, "tail", max_messages=1)) == [3]
    assert orders.fetch(TOPIC, "tail", 1) == []
    tables = everything(db)
    assert all(tables[name] == [] for name in ("leases", "returned", "cases", "parked"))
    assert orders.stats(TOPIC, "tail").lag == 7


@pytest.mark.req("V2", "V9")
def test_a_bare_group_has_all_start_positions(orders: Custody, clock: Clock) -> None:
    orders.create_group(TOPIC, "latest", bare=True, start="latest")
    orders.create_group(TOPIC, "time", bare=True, start=clock.time - timedelta(minutes=2))
    assert orders.fetch(TOPIC, "latest") == []
    assert offsets(orders.fetch(TOPIC, "time")) == [8, 9]


@pytest.mark.req("V2", "G20")
def test_a_position_outside_the_log_is_refused(orders: Custody) -> None:
    orders.create_group(TOPIC, "tail", bare=True)
    for outside in (-1, 11):
        with pytest.raises(OffsetOutOfRange):
            orders.commit(TOPIC, "tail", 0, outside)
    with pytest.raises(PartitionNotFound):
        orders.commit(TOPIC, "tail", 2, 0)
    with pytest.raises(PartitionNotFound):
        orders.fetch(TOPIC, "tail", 2)
    with pytest.raises(GroupNotFound):
        orders.fetch(TOPIC, "nobody")


@pytest.mark.req("V2")
def test_a_bare_group_has_no_lifecycle_and_another_no_position(orders: Custody) -> None:
    orders.create_group(TOPIC, "tail", bare=True)
    for verb in (orders.claim, orders.dead, orders.redrive, orders.pause, orders.resume, orders.blocked_keys):
        with pytest.raises(BareGroup, match="Use fetch and commit"):
            verb(TOPIC, "tail")
    with pytest.raises(BareGroup):
        orders.update_group(TOPIC, "tail", Policy())
    with pytest.raises(BareGroup):
        orders.rewind(TOPIC, "tail", to_offset=0)
    with pytest.raises(InvalidArgument, match="no policy"):
        orders.create_group(TOPIC, "both", Policy(), bare=True)
    orders.create_group(TOPIC, GROUP)
    with pytest.raises(LifecycleGroup):
        orders.commit(TOPIC, GROUP, 0, 5)
    with pytest.raises(LifecycleGroup):
        orders.fetch(TOPIC, GROUP)
