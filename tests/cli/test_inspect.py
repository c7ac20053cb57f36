"""custody trace and stats."""

from __future__ import annotations

import json
import re
import signal

import pytest
from tests.cli.conftest import Run

from custody import Constant, Custody, Policy


@pytest.fixture(autouse=True)
def _topic(live: Custody) -> None:
    live.create_topic("orders")
    live.create_group("orders", "stock", Policy(ordering="key", max_attempts=2, backoff=Constant("0s")))


@pytest.mark.req("V3")
def test_the_timeline_of_a_message_that_failed_twice_was_redriven_and_done(
    quick: Run, live: Custody, explained
) -> None:
    live.publish("orders", {"sku": "SKU-1"}, key="SKU-1")
    for _ in range(2):
        live.claim("orders", "stock").nack(error="timeout")
    live.redrive("orders", "stock", reason="fixed")
    live.claim("orders", "stock").ack()

    lines = quick("trace", "orders", "0", "0").out.splitlines()
    assert lines[:2] == ["orders/0/0  key SKU-1", '  {"sku":"SKU-1"}']
    told = [re.sub(r"^  \S+ \S+  |  \(\+.*\)$", "", line) for line in lines[2:]]
    assert told == [
        "published",
        "in group stock",
        "claimed, attempt 1, by test",
        "failed, attempt 1, by test: timeout",
        "claimed, attempt 2, by test",
        "dead, attempt 2, by test: timeout",
        "redriven: ready with a fresh budget, by test: fixed",
        "claimed, attempt 1, by test",
        "done, by test",
    ]
    document = quick("trace", "orders", "0", "0", "--group", "stock", "--json").document
    explained(document)
    assert document["message"]["payload"] == {"sku": "SKU-1"}
    assert [(e["kind"], e["attempt"], e["error"]) for e in document["entries"]] == [
        ("claim", 1, None),
        ("nack", 1, "timeout"),
        ("claim", 2, None),
        ("dead", 2, "timeout"),
        ("redrive", None, "fixed"),
        ("claim", 1, None),
        ("ack", 1, None),
    ]


def test_a_message_that_nobody_had_yet_and_one_that_is_not_there(quick: Run, live: Custody) -> None:
    live.publish("orders", 1)
    assert quick("trace", "orders", "0", "0").out.splitlines()[-1] == "  not delivered to any group yet"
    assert quick("trace", "orders", "0", "7", "--json", code=1).error["code"] == "offset_out_of_range"
    assert quick("trace", "orders", "9", "0", "--json", code=1).error["code"] == "partition_not_found"
    assert quick("trace", "orders", "0", "0", "--group", "x", "--json", code=1).error["code"] == "group_not_found"


@pytest.mark.req("C8", "N5")
def test_the_figures_of_a_group_and_of_all(quick: Run, live: Custody, explained) -> None:
    live.create_group("orders", "mirror", bare=True)
    live.publish_many("orders", list(range(5)))
    live.claim("orders", "stock", max_messages=2).ack()
    live.claim("orders", "stock")
    one = quick("stats", "orders", "stock", "--json").document
    explained(one)
    assert {name: one[name] for name in ("lag", "in_flight", "dead", "depth", "tail")} == {
        "lag": 2,
        "in_flight": 1,
        "dead": 0,
        "depth": 3,
        "tail": [5],
    }
    assert one["handling"]["leases"] == 1
    assert 0 <= one["handling"]["p50"] <= one["handling"]["p99"]
    assert [stats["group"] for stats in quick("stats", "orders", "--json").document] == ["mirror", "stock"]
    lines = quick("stats", "orders", "stock").out.splitlines()
    assert [line.split() for line in lines[:3]] == [["lag", "2"], ["waiting", "0"], ["in", "flight", "1"]]
    assert lines[-1].split() == ["0", "3", "5", "2", "0", "1", "0", "0", "0"]
    live.pause("orders", "stock", reason="deploy")
    _, mirror, stock = quick("stats", "orders").out.splitlines()
    assert mirror.split()[:2] == ["mirror", "5"]
    assert stock.split()[:7] == ["stock", "2", "0", "1", "0", "0", "3"]
    assert stock.rstrip().endswith("paused: deploy")
    assert quick("stats", "nowhere", "--json", code=1).error["code"] == "topic_not_found"


def test_the_figures_of_a_bound_group_say_so(quick: Run, live: Custody) -> None:
    live.bind("orders", "stock", ["orders.>"])
    assert quick("stats", "orders", "stock", "--json").document["bound"] is True
    assert "bound: lag and depth include messages not matched yet" in quick("stats", "orders", "stock").out


def test_stats_can_be_watched(start, live: Custody) -> None:
    process = start("stats", "orders", "stock", "--watch", "--every", "50ms", "--json")
    assert json.loads(process.stdout.readline())["lag"] == 0
    live.publish("orders", 1)
    while json.loads(process.stdout.readline())["lag"] == 0:
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
