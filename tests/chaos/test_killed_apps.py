"""Apps killed with -9 between ticks and at ticks: each tick is published once, and none is missing."""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta

import pytest
from tests.chaos.conftest import Spawn, kill
from tests.waiting import wait_for

import custody
from custody.model.schedule import SCHEDULE, SCHEDULED_AT

TOPIC = "schedules"


def ticks(c: custody.Custody) -> dict[str, list[datetime]]:
    """The times of the published ticks of each schedule, in the order of the log."""
    found = defaultdict(list)
    for message in c.read(TOPIC, max_messages=1000):
        found[message.headers[SCHEDULE]].append(datetime.fromisoformat(message.headers[SCHEDULED_AT]))
    return found


@pytest.mark.req("X12")
def test_ticks_go_on_when_one_of_two_processes_is_killed_and_are_caught_up_when_both_are(
    database_url: str, spawn: Spawn
) -> None:
    with custody.connect(database_url) as c:
        c.create_topic(TOPIC)
        running = [spawn("scheduled_app.py", database_url, name) for name in ("a", "b")]
        for _ in range(3):
            seen = len(c.read(TOPIC, max_messages=1000))
            wait_for(lambda seen=seen: len(c.read(TOPIC, max_messages=1000)) > seen + 1, "ticks", timeout=60)  # type: ignore[misc]
            kill(running.pop(0))
            running.append(spawn("scheduled_app.py", database_url, "next"))
        for process in running:
            kill(process)
        last = ticks(c)["interval"][-1]
        wait_for(lambda: c.schedule("interval").next_at < datetime.now(last.tzinfo) - timedelta(seconds=2), "a pause")
        spawn("scheduled_app.py", database_url, "last")
        wait_for(
            lambda: ticks(c)["interval"][-1] > last + timedelta(seconds=3), "what was missed is caught up", timeout=60
        )
        for name, found in ticks(c).items():
            expected = [found[0] + timedelta(seconds=n) for n in range(len(found))]
            assert found == expected, f"{name}: a tick is missing, came twice, or is out of order"
        wait_for(
            lambda: all(c.stats(TOPIC, name).depth < 3 for name in ("interval", "cron")),
            "ticks are handled",
            timeout=60,
        )
