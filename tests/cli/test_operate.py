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
def test_a_rewind_is_tried_dry_then_confirmed(quick: Run, live: Custody, explained) -> None:
    rewind = ("rewind", "orders", "stock", "--to-offset", "6")
    dry = quick(*rewind, "--dry-run", "--json").document
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
    assert "give --to-offset or --to-time" in quick("rewind", "orders", "stock", code=2).err
    both = quick("rewind", "orders", "stock", "--to-offset", "0", "--to-time", "1h", code=2)
    assert "--to-offset and --to-time cannot be combined" in both.err
    beyond = quick("rewind", "orders", "stock", "--to-offset", "99", "--partition", "0", "--yes", "--json", code=1)
    assert beyond.error["code"] == "offset_out_of_range"


@pytest.mark.req("V4")
def test_waiting_retries_are_brought_forward(cli: Run, quick: Run, live: Custody, explained) -> None:
    live.update_group("orders", "stock", Policy(ordering="key", backoff=Constant("1h")))
    live.publish_many("orders", [Outgoing(n, key=f"k{n}") for n in range(3)])
    live.claim("orders", "stock", max_messages=3).nack(error="timeout: x")
    retried = cli("retry", "orders", "stock", "--key", "k0", "--reason", "it is back", "--json").document
    explained(retried)
    assert retried == {"topic": "orders", "group": "stock", "count": 1}
    assert quick("retry", "orders", "stock", "--where-error", "refused%").out == "0 waiting messages due now\n"
    assert quick("retry", "orders", "stock", "--where-error", "timeout%").out == "2 waiting messages due now\n"
    assert len(live.claim("orders", "stock", max_messages=3)) == 3
    assert [entry.error for entry in live.trace("orders", 0, 10) if entry.kind == "hasten"] == ["it is back"]


@pytest.mark.req("N3")
def test_pause_and_resume(quick: Run, live: Custody) -> None:
    paused = quick("pause", "orders", "stock", "--reason", "deploy", "--json").document
    assert paused == {"topic": "orders", "group": "stock", "paused": True, "changed": True}
    assert live.stats("orders", "stock").paused_reason == "deploy"
    assert quick("pause", "orders", "stock").out == "orders/stock was paused already\n"
    assert quick("resume", "orders", "stock").out == "orders/stock is resumed\n"
    assert not quick("resume", "orders", "stock", "--json").document["changed"]


@pytest.mark.req("K8")
def test_blocked_keys_are_listed_released_and_skipped(quick: Run, live: Custody, explained) -> None:
    assert quick("blocked", "list", "orders", "stock").out == "No key of orders/stock is blocked.\n"
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

    released = quick("blocked", "release", "orders", "stock", "a", "--reason", "known", "--json").document
    assert released == {"topic": "orders", "group": "stock", "key": "a", "released": 1}
    assert "was not held" in quick("blocked", "release", "orders", "stock", "a").out
    skipped = quick("blocked", "skip", "orders", "stock", "0", "12", "--reason", "known")
    assert skipped.out == "orders/0/12 is done in stock\n"
    assert live.trace("orders", 0, 12)[-1].kind == "skip"
    assert [message.offset for message in live.claim("orders", "stock", max_messages=9)] == [11, 13]
    assert quick("blocked", "skip", "orders", "stock", "0", "3", "--json", code=1).error["code"] == "not_skippable"
