"""The batch that a relay has claimed ahead, while something else takes long or fails."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import pytest
from tests.chaos.proxy import Proxy
from tests.waiting import wait_for

import custody
from custody.outbox import Outbox
from custody.relay import ClaimedEvent, Relay, loop
from custody.store.postgres import Database

pytestmark = pytest.mark.core


def write(connection: psycopg.Connection[Any], *payloads: int, destination: str = "test:") -> None:
    for payload in payloads:
        custody.outbox.write(connection, event_type="e", payload=payload, destination=destination)
    connection.commit()


@pytest.mark.chaos
@pytest.mark.req("O8")
def test_a_stop_while_the_database_is_away_ends_the_relay(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with psycopg.connect(database_url) as mine:
        write(mine, *range(8))
    ahead, leave = threading.Event(), threading.Event()

    def publish(event: ClaimedEvent) -> None:
        if event.payload == 4:
            ahead.set()
        elif event.payload == 2:
            assert leave.wait(20)

    with closing(Proxy(database_url)) as proxy:
        # who finds no database waits for less than 10 s
        monkeypatch.setattr(loop, "Database", partial(Database, timeout=0.2))
        relay = Relay(proxy.url, {"test": publish}, batch=2, lease="1s", poll="10ms")
        thread = threading.Thread(target=relay.run, daemon=True)
        thread.start()
        assert ahead.wait(20), "nothing was claimed ahead"
    relay.stop()
    leave.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.req("O7", "O12")
def test_a_probe_that_hangs_costs_the_batch_ahead_nothing(
    outbox_url: str, outbox: Outbox, mine: psycopg.Connection[Any]
) -> None:
    """A destination that was down is tried for longer than the lease, with a batch ahead: what has been published of
    that is settled, and what has not is kept."""
    write(mine, *range(8))
    write(mine, 99, destination="test:down")
    ahead, probed, leave = threading.Event(), threading.Event(), threading.Event()
    calls: list[int] = []

    def publish(event: ClaimedEvent) -> None:
        calls.append(event.payload)
        if event.payload == 2:
            assert ahead.wait(20)
        elif event.payload == 4:
            relay.outages.failed("test:down")
            ahead.set()
        elif event.payload in (5, 99):
            if event.payload == 99:
                probed.set()
            assert leave.wait(20)

    relay = Relay(
        outbox_url,
        {"test": publish},
        batch=2,
        lease="500ms",
        poll="10ms",
        outage_backoff=custody.Constant("0s"),
    )
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    try:
        assert probed.wait(20), "the destination is not tried"
        until = time.monotonic() + 1.5
        wait_for(lambda: time.monotonic() > until, "time stands still")
        found = outbox.events()
        assert [event.status.value for event in found] == [
            *["PUBLISHED"] * 5,
            "CLAIMED",
            *["PUBLISHED"] * 2,
            "CLAIMED",
        ]
    finally:
        leave.set()
    wait_for(lambda: relay.summary.published == 9, lambda: str(relay.summary))
    relay.stop()
    thread.join(20)
    assert (relay.summary.lost, {event.attempts for event in outbox.events()}) == (0, {0})
    assert sorted(calls) == [*range(8), 99]
