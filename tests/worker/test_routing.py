"""A worker of a bound group gets through what is not bound without a pause for each stretch."""

from __future__ import annotations

import pytest
from tests.waiting import wait_for
from tests.worker.conftest import Start

import custody


@pytest.mark.req("V11")
@pytest.mark.parametrize("messages", [60_000, pytest.param(200_000, marks=pytest.mark.long)])
def test_a_sparse_binding_is_got_through_without_waiting(live: custody.Custody, start: Start, messages: int) -> None:
    """With a poll of an hour it would not end in time if a stretch without a bound message were answered by a wait."""
    live.create_topic("t")
    live.create_group("t", "g", bindings=["in"])
    for begin in range(0, messages, 10_000):
        live.publish_many("t", [custody.Outgoing(b"", routing_key="out") for _ in range(begin, begin + 10_000)])
    live.publish("t", "the last", routing_key="in")
    seen: list[object] = []
    running = start("t", "g", lambda message: seen.append(message.payload), poll="1h")
    wait_for(lambda: seen == ["the last"], "the one bound message is handled")
    wait_for(lambda: live.stats("t", "g").depth == 0, "everything is passed over")
    assert running.stop().done == 1
