"""custody status and workers; stats and groups of all topics."""

from __future__ import annotations

import json
import signal

import pytest
from tests.cli.conftest import Run

from custody import Constant, Custody, Policy

pytestmark = pytest.mark.req("C8")


@pytest.fixture(autouse=True)
def _groups(live: Custody) -> None:
    """Five groups of orders, of which one has a dead letter and one is paused, and a bare one of jobs."""
    live.create_topic("orders")
    live.create_topic("jobs")
    live.create_group("jobs", "mirror", bare=True)
    for name in "abcde":
        live.create_group("orders", name, Policy(max_attempts=1, backoff=Constant("0s")))
    live.publish_many("orders", [1, 2, 3])
    live.claim("orders", "b").nack(error="broken")
    live.pause("orders", "d", reason="deploy")


def test_the_worst_groups_come_first(quick: Run, explained) -> None:
    document = quick("status", "--json").document
    explained(document)
    assert [one["group"] for one in document["groups"]][:2] == ["d", "b"]
    shown = quick("status", "--limit", "3")
    lines = shown.out.splitlines()
    assert lines[0].startswith("2 topics, 6 groups, 2 in trouble; ")
    assert lines[1].split()[:4] == ["group", "trouble", "lag", "waiting"]
    assert [line.split()[0] for line in lines[2:4]] == ["orders/d", "orders/b"]
    assert "paused" in lines[2]
    assert "dead letters" in lines[3]
    assert lines[5] == "… and 3 more groups, 0 in trouble (--limit 0: all)"
    assert len(quick("status", "--limit", "0").out.splitlines()) == 8


def test_only_trouble_has_a_colour(quick: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from custody.cli import render

    monkeypatch.setenv("FORCE_COLOR", "1")
    render.console.cache_clear()
    try:
        lines = quick("status").out.splitlines()
        plain = quick("status", "--no-color").out.splitlines()
    finally:
        render.console.cache_clear()
    red = "\x1b[31m"
    assert [red in line for line in lines] == [True, False, True, True, False, False, False, False]
    assert not any(red in line for line in plain)


def test_the_backlog_and_schedules_in_trouble_are_named(quick: Run, live: Custody) -> None:
    live.ensure_schedule("report", topic="jobs", every="1h", app="shop")
    assert "schedule report is unattended" in quick("status").out
    assert "outbox" not in quick("status").out


def test_workers_with_what_they_hold(quick: Run, live: Custody, explained) -> None:
    live.claim("orders", "a", max_messages=3)
    document = quick("workers", "--json").document
    explained(document)
    assert [(one["group"], one["worker"], one["in_flight"]) for one in document] == [("a", "test", 3), ("b", "test", 0)]
    assert quick("workers").out.splitlines()[1].split()[:3] == ["test", "orders/a", "3"]


def test_groups_and_stats_of_all_topics(quick: Run, explained) -> None:
    listed = quick("groups", "list").out.splitlines()
    assert listed[0].split()[:2] == ["topic", "group"]
    assert listed[1].split()[:3] == ["jobs", "mirror", "bare"]
    assert len(quick("groups", "list", "--json").document) == 6
    document = quick("stats", "--json").document
    explained(document)
    assert [(one["topic"], one["group"]) for one in document][:2] == [("jobs", "mirror"), ("orders", "a")]
    assert [line.split()[0] for line in quick("stats").out.splitlines()][1:3] == ["jobs/mirror", "orders/a"]


def test_the_status_can_be_watched(start, live: Custody) -> None:
    process = start("status", "--watch", "--every", "50ms", "--json")
    assert json.loads(process.stdout.readline())["groups"][0]["group"] == "d"
    live.resume("orders", "d")
    while json.loads(process.stdout.readline())["groups"][0]["group"] == "d":
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
