"""custody groups: list, create, describe, update, bind, delete."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from tests.cli.conftest import Run

from custody import Breaker, Constant, Custody, Exponential, Policy


def test_a_group_with_its_policy(quick: Run, live: Custody, explained) -> None:
    live.create_topic("orders")
    created = quick(
        *("groups", "create", "orders", "stock", "--ordering", "key", "--max-attempts", "5", "--on-dead", "hold"),
        *("--backoff", "exponential:2s:cap=5m:jitter=0.1", "--visibility-timeout", "1m", "--handler-timeout", "50s"),
        *("--max-in-flight", "100", "--max-ack-holes", "none", "--max-parked", "7", "--breaker", "0.5:window=10s"),
        "--json",
    ).document
    explained(created)
    asked = Policy(
        ordering="key",
        max_attempts=5,
        on_dead="hold",
        backoff=Exponential("2s", cap="5m", jitter=0.1),
        visibility_timeout="1m",
        handler_timeout="50s",
        max_in_flight=100,
        max_ack_holes=None,
        max_parked=7,
        breaker=Breaker(failure_rate=0.5, window="10s"),
    )
    assert created["policy"] == asked.plain()
    assert quick("groups", "describe", "orders", "stock", "--json").document == created
    described = quick("groups", "describe", "orders", "stock").out
    assert "backoff             exponential, initial 2 s, cap 5 min, jitter 0.1, multiplier 2.0" in described

    quick("groups", "update", "orders", "stock", "--max-attempts", "9", "--max-parked", "none", "--breaker", "off")
    policy = live.group("orders", "stock").policy
    assert policy is not None
    assert (policy.max_attempts, policy.max_parked, policy.breaker, policy.on_dead) == (9, None, None, "hold")
    assert quick("groups", "update", "orders", "stock", code=2).err.startswith(
        "error: Invalid value: give a setting to change"
    )

    live.create_group("orders", "mirror", bare=True)
    assert [group["name"] for group in quick("groups", "list", "orders", "--json").document] == ["mirror", "stock"]
    listed = quick("groups", "list", "orders").out.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["mirror", "bare"], ["stock", "ordering"]]


def test_without_a_policy_the_configured_defaults_hold(quick: Run, live: Custody) -> None:
    live.create_topic("orders")
    quick("groups", "create", "orders", "a", CUSTODY_MAX_RETRIES="7")
    quick("groups", "create", "orders", "b", "--backoff", "constant:1s", CUSTODY_MAX_RETRIES="7")
    defaults, changed = live.group("orders", "a").policy, live.group("orders", "b").policy
    assert defaults is not None
    assert changed is not None
    assert (defaults.max_attempts, defaults.backoff.kind) == (7, Exponential.kind)
    assert (changed.max_attempts, changed.backoff.kind) == (7, Constant.kind)


@pytest.mark.req("V9")
def test_the_start_positions(quick: Run, live: Custody) -> None:
    live.create_topic("orders")
    live.publish_many("orders", [0, 1])
    middle = datetime.now(UTC)
    live.publish_many("orders", [2, 3])
    for start in ("earliest", "latest", "1", middle.isoformat(), "1h"):
        quick("groups", "create", "orders", f"from-{start[:8]}", "--start", start)
    lags = {group.name: live.stats("orders", group.name).lag for group in live.groups("orders")}
    assert lags == {
        "from-earliest": 4,
        "from-latest": 0,
        "from-1": 3,
        f"from-{middle.isoformat()[:8]}": 2,
        "from-1h": 4,
    }
    assert (
        quick("groups", "create", "orders", "x", "--start", "9", "--json", code=1).error["code"]
        == "offset_out_of_range"
    )
    assert (
        "is not earliest, latest, an offset or a time"
        in quick("groups", "create", "orders", "x", "--start", "soon", code=2).err
    )


@pytest.mark.req("V2")
def test_a_bare_group_takes_no_policy(quick: Run, live: Custody) -> None:
    live.create_topic("orders")
    quick("groups", "create", "orders", "mirror", "--bare")
    assert live.group("orders", "mirror").bare
    assert quick("groups", "create", "orders", "x", "--bare", "--max-attempts", "2", "--json", code=1).error[
        "code"
    ] == ("invalid_argument")
    assert quick("groups", "update", "orders", "mirror", "--max-attempts", "2", "--json", code=1).error["code"] == (
        "bare_group"
    )


def test_a_wrong_policy_is_refused_before_anything_happens(quick: Run, live: Custody) -> None:
    live.create_topic("orders")
    create = ("groups", "create", "orders", "stock")
    assert "Did you mean 'exponential'?" in quick(*create, "--backoff", "exponentail:2s", code=2).err
    assert "is not a duration" in quick(*create, "--visibility-timeout", "soon", code=2).err
    assert quick(*create, "--on-dead", "hold", "--json", code=1).error["code"] == "invalid_policy"
    assert live.groups("orders") == []


def test_a_group_is_deleted_only_when_confirmed(quick: Run, live: Custody) -> None:
    live.create_topic("orders")
    live.create_group("orders", "stock", Policy())
    live.publish("orders", 1)
    assert "with 1 unresolved message?" in quick("groups", "delete", "orders", "stock", code=2).err
    assert len(live.groups("orders")) == 1
    assert quick("groups", "delete", "orders", "stock", "-y").out == "deleted group stock of topic orders\n"
    assert live.groups("orders") == []


@pytest.mark.req("V11")
def test_what_a_group_gets(quick: Run, live: Custody, explained) -> None:
    live.create_topic("orders")
    created = quick(
        *("groups", "create", "orders", "eu", "--bind", "orders.eu.*", "--bind", "stock.>", "--bind-header", "vip=yes"),
        "--json",
    ).document
    explained(created)
    vip = {"vip": "yes"}
    assert created["bindings"] == [{"pattern": "orders.eu.*", "headers": vip}, {"pattern": "stock.>", "headers": vip}]
    assert (
        "bound to            orders.eu.* and vip=yes; stock.> and vip=yes"
        in quick("groups", "describe", "orders", "eu").out
    )
    quick("publish", "orders", "1", "--routing-key", "orders.eu.created", "-H", "vip=yes")
    quick("publish", "orders", "2", "--routing-key", "orders.us.created", "-H", "vip=yes")
    quick(
        *("publish", "orders", "--envelope", '{"payload": 3, "routing_key": "stock.a.b", "headers": {"vip": "yes"}}'),
        *("--routing-key", "other"),
    )
    consumed = quick("consume", "orders", "eu", "--max", "9").out
    assert "routing=orders.eu.created  vip=yes  1" in consumed
    assert "routing=stock.a.b  vip=yes  3" in consumed
    assert "orders.us" not in consumed
    assert "passed over: the group is not bound to it" in quick("trace", "orders", "0", "1").out

    bound = quick("groups", "bind", "orders", "eu", "--bind-header", "vip=no", "--json").document
    assert bound["bindings"] == [{"pattern": None, "headers": {"vip": "no"}}]
    assert "vip=no" in quick("groups", "list", "orders").out
    assert quick("groups", "bind", "orders", "eu", "--everything", "--json").document["bindings"] == []
    assert "everything" in quick("groups", "list", "orders").out


@pytest.mark.req("V11")
def test_bad_bindings_and_routing_keys_are_refused(quick: Run, live: Custody) -> None:
    live.create_topic("orders")
    live.create_group("orders", "eu")
    assert "is not a pattern" in quick("groups", "bind", "orders", "eu", "--bind", "a*", code=2).err
    assert "give --bind" in quick("groups", "bind", "orders", "eu", code=2).err
    assert "give --bind" in quick("groups", "bind", "orders", "eu", "--bind", "a", "--everything", code=2).err
    assert "is not a routing key" in quick("publish", "orders", "1", "--routing-key", "a.*", code=1).err
    assert live.topic("orders").message_count == 0
