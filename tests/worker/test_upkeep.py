"""A worker looks after the retention of its topic while it works, and is not stopped by what goes wrong there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import psycopg
import pytest
from tests.waiting import wait_for

from custody import Custody, Retention


def work(c: Custody, until: Callable[[], bool]) -> list[object]:
    """Runs a worker whose upkeep comes often, until that is true."""
    seen: list[object] = []
    worker = c.worker_for("orders", "stock", lambda message: seen.append(message.payload), upkeep="50ms", poll="50ms")
    running = threading.Thread(target=worker.run)
    running.start()
    try:
        wait_for(until, "the upkeep of the worker has not come so far")
    finally:
        worker.stop()
        running.join(20)
    return seen


@pytest.mark.req("V13")
def test_a_worker_drops_what_retention_lets_go(live: Custody) -> None:
    live.create_topic("orders", retention=Retention(size="1B", segment_size="1B"))
    live.create_group("orders", "stock")
    live.publish_many("orders", range(10))
    assert sorted(work(live, lambda: live.topic("orders").first_offsets == (10,))) == list(range(10))  # type: ignore[type-var]


@pytest.mark.req("V13")
def test_an_error_of_upkeep_is_logged_and_the_worker_goes_on(
    live: Custody, db: psycopg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    live.create_topic("orders")
    live.create_group("orders", "stock")
    db.execute("DROP FUNCTION custody.maintain")
    with caplog.at_level(logging.WARNING, "custody.verbs.upkeep"):
        live.publish("orders", 1)
        seen = work(live, lambda: sum("upkeep" in record.message for record in caplog.records) >= 2)
    assert seen == [1]
