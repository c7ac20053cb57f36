"""A destination that takes only so much at a time: the relay waits for it, and no event pays for that."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

import custody
from custody.errors import PublisherUnavailable
from custody.outbox import Outbox, State
from custody.relay import Claimed, Publisher, Relay

pytestmark = pytest.mark.core


class Bucket(Publisher):
    """Takes one event every so many seconds, and sends away what comes between."""

    def __init__(self, every: float) -> None:
        self._every, self._next, self._guard = every, 0.0, threading.Lock()
        self.sent_away = 0

    def publish(self, event: Claimed) -> None:
        with self._guard:
            if time.monotonic() < self._next:
                self.sent_away += 1
                raise PublisherUnavailable("429", busy=True)
            self._next = time.monotonic() + self._every


@pytest.mark.req("O12")
def test_a_limit_of_requests_charges_no_event(alone_url: str) -> None:
    with psycopg.connect(alone_url) as mine:
        for n in range(40):
            custody.outbox.write(mine, event_type="e", payload=n, destination="test:")
    bucket = Bucket(0.02)
    relay = Relay(
        alone_url,
        {"test": bucket},
        poll="10ms",
        max_attempts=2,
        backoff=custody.Constant("10ms"),
        outage_backoff=custody.Constant("20ms"),
    )
    relay.drain("30s")
    assert bucket.sent_away > 0
    with Outbox(alone_url) as outbox:
        assert {(event.status, event.attempts) for event in outbox.events()} == {(State.PUBLISHED, 0)}
