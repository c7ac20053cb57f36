"""custody rewind, pause, resume, blocked."""

from __future__ import annotations

import pytest
from tests.cli.conftest import Run

from custody import Constant, Custody, Outgoing, Policy


@pytest.fixture(autouse=True)
def _done(live: Custody) -> None:
    """Ten messages, all done."""
    live.create_topic("orders")
    live.create_group("orders", "stock", Policy(ordering="key", on_dead="hold", max_attempts=1, backoff=Constant("0s")))
    live.publish_many("orders", list(range(10)))
    live.claim("orders", "stock", max_messages=10).ack()


@pytest.mark.req("V9")
def test_a_rewind_is_tried_dry_then_confirmed(cli: Run, quick: Run, live: Custody, explained) -> None:
    rewind = ("rewind", "orders", "stock", "--to-offset", "6")
    dry = cli(*rewind, "--dry-run", "--json").document
    explained(dry)
    assert dry == {
        "topic": "orders",
        "group": "stock",
        "dry_run": True,
        "messages": 4,
        "partitions": [{"partition": 0, "target": 6, "messages": 4}],
    }
    assert "deliver 4 messages again?" in quick(*rewind, code=2).err
    assert live.stats("orders", "stock").depth == 0
    done = quick(*rewind, "--partition", "0", "--reason", "a bug", "--yes")
    assert done.out.splitlines()[-1] == "4 messages will be delivered again"
    assert live.stats("orders", "stock").waiting == 4
    assert live.trace("orders", 0, 6)[-1].error == "a bug"
    assert quick("rewind", "orders", "stock", "--to-time", "1h", "--dry-run", "--json").document["messages"] == 10


def test_a_rewind_has_one_target(quick: Run) -> None:
    assert "say where to" in quick("rewind", "orders", "stock", code=2).err
    both = quick("rewind", "orders", "stock", "--to-offset", "0", "--to-time", "1h", code=2)
    assert "--to-offset and --to-time exclude one another" in both.err
    beyond = quick("rewind", "orders", "stock", "--to-offset", "99", "--partition", "0", "--yes", "--json", code=1)
    assert beyond.error["code"] == "offset_out_of_range"


@pytest.mark.req("N3")
def test_pause_and_resume(cli: Run, quick: Run, live: Custody) -> None:
    paused = cli("pause", "orders", "stock", "--reason", "deploy", "--json").document
    assert paused == {"topic": "orders", "group": "stock", "paused": True, "changed": True}
    assert live.stats("orders", "stock").paused_reason == "deploy"
    assert quick("pause", "orders", "stock").out == "orders/stock was paused already\n"
    assert cli("resume", "orders", "stock").out == "orders/stock goes on\n"
    assert not quick("resume", "orders", "stock", "--json").document["changed"]


@pytest.mark.req("K8")
def test_blocked_keys_are_listed_released_and_skipped(cli: Run, quick: Run, live: Custody, explained) -> None:
    assert cli("blocked", "list", "orders", "stock").out == "No key of orders/stock is blocked.\n"
    live.publish_many("orders", [Outgoing(n, key=key) for n, key in enumerate("aabb")])
    lease = live.claim("orders", "stock", max_messages=4)
    lease.nack(lease.messages[0], error="poison")
    lease.nack(lease.messages[2], error="poison")

    blocked = quick("blocked", "list", "orders", "stock", "--json").document
    explained(blocked)
    assert [(b["key"], b["why"], b["blocked_by"], b["parked"], b["last_error"]) for b in blocked] == [
        ("a", "held", 10, 1, "poison"),
        ("b", "held", 12, 1, "poison"),
    ]
    lines = quick("blocked", "list", "orders", "stock").out.splitlines()
    assert lines[1].split()[:4] == ["a", "held", "0/10", "1"]

    released = cli("blocked", "release", "orders", "stock", "a", "--reason", "known", "--json").document
    assert released == {"topic": "orders", "group": "stock", "key": "a", "released": 1}
    assert "was not held" in quick("blocked", "release", "orders", "stock", "a").out
    skipped = cli("blocked", "skip", "orders", "stock", "0", "12", "--reason", "known")
    assert skipped.out == "orders/0/12 counts as done in stock\n"
    assert live.trace("orders", 0, 12)[-1].kind == "skip"
    assert [message.offset for message in live.claim("orders", "stock", max_messages=9)] == [11, 13]
    assert quick("blocked", "skip", "orders", "stock", "0", "3", "--json", code=1).error["code"] == "not_skippable"
