"""How many events whoever moves them into topics says it has moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import custody
from custody.engine.server_verbs import ServerVerbs
from custody.relay import Relay

pytestmark = [pytest.mark.core, pytest.mark.req("V10")]


def by_a_server(c: custody.Custody) -> int:
    return ServerVerbs(c).move_outbox()


def by_a_relay(c: custody.Custody) -> int:
    relay = Relay(c)
    try:
        assert relay.run_once() == relay.summary.moved
        return relay.summary.moved
    finally:
        relay.close()


@pytest.mark.parametrize("moved", [by_a_server, by_a_relay])
def test_what_went_into_a_topic_is_counted_and_what_lost_its_topic_is_not(
    database_url: str, moved: Callable[[custody.Custody], int]
) -> None:
    with custody.connect(database_url) as c, psycopg.connect(database_url) as mine:
        c.create_topic("orders", partitions=3)
        c.create_topic("gone")
        for n in range(7):
            write(mine, n, "orders")
            write(mine, n, "gone")
        mine.commit()
        c.delete_topic("gone")
        assert moved(c) == 7
        assert c.topic("orders").message_count == 7
        assert moved(c) == 0


def write(connection: psycopg.Connection[Any], n: int, topic: str) -> None:
    custody.outbox.write(connection, event_type="e", payload=n, destination=topic, ordering_key=str(n))
