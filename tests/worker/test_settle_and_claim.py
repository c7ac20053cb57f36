"""A quick worker of an ordered group settles a lease with its failures in the transaction of the next claim."""

from __future__ import annotations

from typing import Any

import pytest
from tests.waiting import wait_for
from tests.worker.conftest import Running

import custody
from custody import Constant, Message, Outgoing, Policy
from custody.worker import Worker


class Noting:
    """Custody that notes how leases were settled."""

    def __init__(self, c: custody.Custody) -> None:
        self._c, self.alone, self.together = c, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._c, name)

    def settle(self, *given: Any, **settings: Any) -> Any:
        self.alone += 1
        return self._c.settle(*given, **settings)

    def claim(self, *given: Any, **settings: Any) -> Any:
        outcomes = settings.get("outcomes") or {}
        self.together += any(outcome.kind == "nack" for outcome in outcomes.values())
        return self._c.claim(*given, **settings)


@pytest.mark.req("G5", "K2")
def test_failures_are_settled_with_the_next_claim(live: custody.Custody) -> None:
    live.create_topic("orders")
    live.create_group("orders", "stock", Policy(ordering="key", backoff=Constant("1h")))
    # the last message but one of each lease fails, and the last one is behind it
    live.publish_many("orders", [Outgoing(n, key=f"key-{min(n % 10, 8)}-{n // 10}") for n in range(30)])

    def handler(message: Message) -> None:
        if message.offset % 10 == 8:
            raise ValueError("it fails")

    noting: Any = Noting(live)
    running = Running(Worker(noting, "orders", "stock", handler, concurrency=1, max_messages=10))
    try:
        wait_for(lambda: live.stats("orders", "stock").waiting == 3, "all are handled")
    finally:
        summary = running.stop()
    assert (summary.done, summary.failed, noting.together) == (24, 3, 3)
    stats = live.stats("orders", "stock")
    assert (stats.waiting, stats.parked, stats.in_flight) == (3, 3, 0)
