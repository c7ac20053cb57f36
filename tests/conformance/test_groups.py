"""Groups, their policies and bindings, bare groups, by either way."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from tests.conformance.conftest import Fill, blocking, refused
from tests.conftest import Clock

import custody
from custody import Binding, Breaker, Constant, Exponential, Linear, Policy

pytestmark = pytest.mark.core

POLICIES = [
    Policy(),
    Policy(ordering="key", on_dead="hold", max_attempts=7, visibility_timeout="90s", handler_timeout="1m"),
    Policy(ordering="key", fairness="tenant", tenant_separator="/", backoff=Linear("2s", cap="1m", jitter=0.25)),
    Policy(backoff=Exponential("250ms", multiplier=3, cap="5s"), max_in_flight=5, max_ack_holes=None, max_parked=10),
    Policy(backoff=Constant("1500ms"), dead_letter="topic", breaker=Breaker(failure_rate=0.25, window="1m")),
]


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_a_group_has_the_policy_that_it_was_given(c: custody.Custody, direct: custody.Custody, policy: Policy) -> None:
    c.create_topic("orders")
    made = c.create_group("orders", "g", policy)
    assert made.policy is not None
    assert made.policy.columns() == policy.columns()
    assert made == c.group("orders", "g") == direct.group("orders", "g")
    assert c.groups("orders") == [made]


def test_the_figures_say_whether_a_group_is_bound(c: custody.Custody, direct: custody.Custody) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", bindings=["orders.>"])
    c.create_group("orders", "all")
    assert [c.stats("orders", group).bound for group in ("g", "all")] == [True, False]
    assert c.stats("orders", "g") == direct.stats("orders", "g")


@pytest.mark.parametrize(
    "bindings",
    [
        [f"{'*.' * 10}p{n}" for n in range(100)],
        [f"{'x' * 990}{n}" for n in range(11)],
        [f"p{n}" for n in range(101)],
        [Binding("p", headers={"n": str(n)}) for n in range(21)],
    ],
    ids=["segments", "characters", "bindings", "conditions"],
)
def test_bindings_have_bounds_which_are_named(orders: custody.Custody, bindings: list[Binding | str]) -> None:
    for bind in (
        lambda: orders.bind("orders", "stock", bindings),
        lambda: orders.create_group("orders", "other", bindings=bindings),
    ):
        with pytest.raises(custody.errors.InvalidArgument, match="at most") as refused_:
            bind()
        assert refused_.value.remedy
    assert orders.group("orders", "stock").bindings == ()


def test_a_policy_is_replaced_as_a_whole(orders: custody.Custody) -> None:
    changed = orders.update_group("orders", "stock", Policy(ordering="key", max_attempts=9))
    assert changed.policy is not None
    assert changed.policy.columns() == Policy(ordering="key", max_attempts=9).columns()
    with refused("invalid_argument"):
        orders.update_group("orders", "stock", Policy(ordering="none"))


def test_some_settings_and_the_bindings_are_changed_at_once(orders: custody.Custody) -> None:
    orders.update_group("orders", "stock", Policy(ordering="key", max_attempts=9))
    settings = {"visibility_timeout": "5s", "backoff": Linear("2s"), "breaker": None}
    changed = orders.change_group("orders", "stock", policy=settings, bindings=["a.*"])
    assert changed.policy is not None
    wanted = Policy(ordering="key", max_attempts=9, visibility_timeout="5s", backoff=Linear("2s"))
    assert (changed.policy.columns(), changed.bindings) == (wanted.columns(), (Binding("a.*"),))
    for wrong in ({"max_attempt": 3}, {"max_attempts": 0}, {"backoff": {"kind": "sudden"}}, {"fairness": "nobody"}):
        with refused("invalid_policy"):
            orders.change_group("orders", "stock", policy=wrong, bindings=None)
    with refused("invalid_argument"):
        orders.change_group("orders", "stock")
    assert orders.group("orders", "stock") == changed, "all of it, or nothing"


def test_what_cannot_be_a_group_is_refused(orders: custody.Custody) -> None:
    with refused("group_exists"):
        orders.create_group("orders", "stock")
    for name in ("", "a/b", "a b", "x" * 201):
        with refused("invalid_argument"):
            orders.create_group("orders", name)
    with refused("invalid_argument"):
        orders.create_group("orders", "other", Policy(), bare=True)
    with refused("invalid_argument"):
        orders.create_group("orders", "other", start="someday")  # type: ignore[arg-type]
    with refused("invalid_argument"):
        orders.create_group("orders", "other", start=datetime(2030, 1, 1))
    assert [group.name for group in orders.groups("orders")] == ["stock"]


@blocking
@pytest.mark.parametrize("name", ["nothing", "default", "", "a/b", ".."])
def test_a_group_that_is_not_there_is_not_found(orders: custody.Custody, name: str) -> None:
    for ask in (
        lambda: orders.group("orders", name),
        lambda: orders.claim("orders", name),
        lambda: orders.update_group("orders", name, Policy()),
        lambda: orders.bind("orders", name, ["a"]),
        lambda: orders.delete_group("orders", name),
        lambda: orders.pause("orders", name),
        lambda: orders.resume("orders", name),
        lambda: orders.stats("orders", name),
        lambda: orders.dead("orders", name),
        lambda: orders.redrive("orders", name),
        lambda: orders.discard("orders", name),
        lambda: orders.rewind("orders", name, to_offset=0),
        lambda: orders.blocked_keys("orders", name),
        lambda: orders.release_key("orders", name, "k"),
        lambda: orders.key_states("orders", name),
        lambda: orders.delete_key_states("orders", name, key="k"),
        lambda: orders.skip("orders", name, 0, 0),
        lambda: orders.next_due("orders", name),
        lambda: orders.fetch("orders", name),
        lambda: orders.commit("orders", name, 0, 0),
        lambda: orders.worker_for("orders", name, print),
    ):
        with refused("group_not_found"):
            ask()
    assert [group.name for group in orders.groups("orders")] == ["stock"]


def test_a_group_starts_where_it_is_told(c: custody.Custody, clock: Clock, fill: Fill) -> None:
    c.create_topic("orders")
    fill(3)
    clock.move(60)
    fill(2)
    starts = {"first": "earliest", "last": "latest", "second": 1, "minute": clock() - timedelta(seconds=1)}
    for name, start in starts.items():
        c.create_group("orders", name, start=start)  # type: ignore[arg-type]
    assert {name: c.stats("orders", name).lag for name in starts} == {"first": 5, "last": 0, "second": 4, "minute": 2}


def test_a_deleted_group_is_gone(orders: custody.Custody) -> None:
    orders.delete_group("orders", "stock")
    assert orders.groups("orders") == []


def test_a_paused_group_hands_out_nothing(orders: custody.Custody, fill: Fill, clock: Clock) -> None:
    fill(2)
    lease = orders.claim("orders", "stock")
    assert orders.pause("orders", "stock", reason="a bad: deploy") is True
    assert orders.pause("orders", "stock") is False
    paused = orders.claim("orders", "stock")
    assert (bool(paused), paused.reason, paused.detail) == (False, "paused", "a bad: deploy")
    group = orders.group("orders", "stock")
    assert (group.paused_reason, group.paused_at) == ("a bad: deploy", clock())
    assert lease.ack().settled == 1
    assert orders.resume("orders", "stock") is True
    assert orders.resume("orders", "stock") is False
    assert len(orders.claim("orders", "stock")) == 1


def test_a_group_is_bound_to_a_part_of_the_log(c: custody.Custody) -> None:
    c.create_topic("orders")
    bound = [Binding("eu.*"), Binding(headers={"tier": "gold"}), Binding("us.>", headers={"tier": "silver"})]
    assert c.create_group("orders", "g", bindings=bound).bindings == tuple(bound)
    c.publish("orders", 1, routing_key="eu.new")
    c.publish("orders", 2, routing_key="us.new")
    c.publish("orders", 3, headers={"tier": "gold"})
    assert [message.payload for message in c.claim("orders", "g", max_messages=9)] == [1, 3]
    assert c.bind("orders", "g", "us.>").bindings == (Binding("us.>"),)
    assert c.bind("orders", "g", None).bindings == ()
    with refused("invalid_argument"):
        c.bind("orders", "g", ["a..b"])


@blocking
def test_a_bare_group_is_a_cursor(c: custody.Custody, fill: Fill) -> None:
    c.create_topic("orders")
    assert c.create_group("orders", "b", bare=True).policy is None
    fill(5)
    assert [message.offset for message in c.fetch("orders", "b", max_messages=3)] == [0, 1, 2]
    c.commit("orders", "b", 0, 3)
    assert [message.offset for message in c.fetch("orders", "b")] == [3, 4]
    for ask in (
        lambda: c.claim("orders", "b"),
        lambda: c.update_group("orders", "b", Policy()),
        lambda: c.dead("orders", "b"),
        lambda: c.worker_for("orders", "b", print),
    ):
        with refused("bare_group"):
            ask()
    with refused("partition_not_found"):
        c.fetch("orders", "b", 3)
    with refused("partition_not_found"):
        c.commit("orders", "b", 3, 0)


def test_a_group_with_a_lifecycle_is_no_cursor(orders: custody.Custody) -> None:
    with refused("lifecycle_group"):
        orders.fetch("orders", "stock")
    with refused("lifecycle_group"):
        orders.commit("orders", "stock", 0, 0)
