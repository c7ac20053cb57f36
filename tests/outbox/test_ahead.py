"""The batch that a relay has claimed ahead, while something else takes long or fails."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

import psycopg
import pytest
from tests.chaos.proxy import Proxy

import custody
from custody.relay import Claimed, Relay
from custody.store.postgres import Database

pytestmark = pytest.mark.core


def write(connection: psycopg.Connection[Any], *payloads: int, destination: str = "test:") -> None:
    for payload in payloads:
        custody.outbox.write(connection, event_type="e", payload=payload, destination=destination)
    connection.commit()


@pytest.mark.req("O8")
def test_a_stop_while_the_database_is_away_ends_the_relay(database_url: str) -> None:
    with psycopg.connect(database_url) as mine:
        write(mine, *range(8))
    ahead, leave = threading.Event(), threading.Event()

    def publish(event: Claimed) -> None:
        if event.payload == 4:
            ahead.set()
        elif event.payload == 2:
            assert leave.wait(20)

    with closing(Proxy(database_url)) as proxy:
        relay = Relay(proxy.url, {"test": publish}, batch=2, lease="1s", poll="10ms")
        relay._db.close()
        relay._db = Database(proxy.url, pool_size=4, timeout=0.2)  # who finds no database waits for less than 10 s
        thread = threading.Thread(target=relay.run, daemon=True)
        thread.start()
        assert ahead.wait(20), "nothing was claimed ahead"
    relay.stop()
    leave.set()
    thread.join(10)
    assert not thread.is_alive()
