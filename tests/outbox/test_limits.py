"""Destinations that take only so much at a time, or nothing: the relay waits, and nobody pays for that."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest
from tests.waiting import wait_for

import custody
from custody.errors import PublisherUnavailable
from custody.outbox import EventState, Outbox
from custody.relay import ClaimedEvent, Publisher, Relay, loop
from custody.relay.claims import Found, OutboxClaims

pytestmark = pytest.mark.core


class Bucket(Publisher):
    """Takes one event every so many seconds, and sends away what comes between."""

    def __init__(self, every: float) -> None:
        self._every, self._next, self._guard = every, 0.0, threading.Lock()
        self.sent_away = 0

    def publish(self, event: ClaimedEvent) -> None:
        with self._guard:
            if time.monotonic() < self._next:
                self.sent_away += 1
                raise PublisherUnavailable("429", busy=True)
            self._next = time.monotonic() + self._every


@pytest.mark.req("O12")
def test_no_event_dies_of_a_limit_of_requests(alone_url: str) -> None:
    with psycopg.connect(alone_url) as mine:
        for n in range(40):
            custody.outbox.write(mine, event_type="e", payload=n, destination="test:")
    bucket = Bucket(0.02)
    relay = Relay(
        alone_url,
        {"test": bucket},
        poll="10ms",
        max_attempts=2,
        retry_for="0s",
        backoff=custody.Constant("10ms"),
        outage_backoff=custody.Constant("20ms"),
    )
    relay.drain("30s")
    assert bucket.sent_away > 0
    with Outbox(alone_url) as outbox:
        assert {event.status for event in outbox.events()} == {EventState.PUBLISHED}
        assert sum(event.attempts for event in outbox.events()) == bucket.sent_away


@pytest.mark.req("O12")
def test_an_outage_lasts_while_another_relay_has_the_only_event(alone_url: str) -> None:
    with psycopg.connect(alone_url) as mine:
        event = custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    relay = Relay(alone_url, {"test": lambda _: None}, outage_backoff=custody.Constant("0s"))
    with psycopg.connect(alone_url, autocommit=True) as other, Outbox(alone_url) as outbox:
        other.execute("SELECT custody.outbox_claim('other', 1, '1 h', 3)")
        relay.outages.failed("test:")
        relay.run_once()
        assert relay.outages.down == ["test:"]
        outbox.kill([event])
        relay.run_once()
        assert relay.outages.down == []
    relay.close()


@pytest.mark.req("O7", "O12")
def test_claims_are_kept_during_a_long_look_for_an_event_to_try(
    alone_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay passes a backlog in many steps that together take longer than the lease."""
    with psycopg.connect(alone_url) as mine:
        custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    entered, leave, looked = threading.Event(), threading.Event(), threading.Event()
    claim = OutboxClaims.claim

    def slow(claims: OutboxClaims, most: int, *, only: Any = None, **given: Any) -> Any:
        if only is None:
            return claim(claims, most, **given)
        until = time.monotonic() + 0.1
        wait_for(lambda: time.monotonic() > until, "time stands still")
        step = given["after"] + 1
        if step == 20:
            looked.set()
            leave.set()
        return Found(None, step if step < 20 else None, False)

    def publish(_: ClaimedEvent) -> None:
        entered.set()
        assert leave.wait(20)

    monkeypatch.setattr(OutboxClaims, "claim", slow)
    relay = Relay(alone_url, {"test": publish}, lease="500ms", poll="10ms")
    thread = threading.Thread(target=relay.run, daemon=True)
    thread.start()
    assert entered.wait(20)
    relay.outages.failed("test:down")
    assert looked.wait(20)
    wait_for(lambda: sum((relay.summary.published, relay.summary.lost)) == 1, "it is not settled")
    relay.stop()
    thread.join(20)
    assert (relay.summary.published, relay.summary.lost) == (1, 0)


@pytest.mark.req("O12")
def test_a_backlog_that_waits_is_not_passed_again_for_each_batch(
    alone_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(alone_url) as mine:
        mine.execute(
            "SELECT count(custody.outbox_write('e', '0', 'test:', p_available_at => now() + interval '1 h')) "
            "FROM generate_series(1, 12000)"
        )
        for n in range(40):
            custody.outbox.write(mine, event_type="e", payload=n, destination="test:")
    starts: list[int] = []
    claim = OutboxClaims.claim

    def noted(claims: OutboxClaims, most: int, *, after: int, **given: Any) -> Any:
        starts.append(after)
        until = time.monotonic() + 0.1  # longer than AT_LEAST
        wait_for(lambda: time.monotonic() > until, "time stands still")
        return claim(claims, most, after=after, **given)

    seen: list[ClaimedEvent] = []

    def publish(event: ClaimedEvent) -> None:
        seen.append(event)
        if len(seen) == 40:
            relay.stop()

    monkeypatch.setattr(OutboxClaims, "claim", noted)
    monkeypatch.setattr(loop, "LOOKING", 0.001)
    relay = Relay(alone_url, {"test": publish}, batch=5, poll="10ms")
    assert relay.drain("30s").published == 40
    assert starts.count(0) == 1, f"it began anew: {starts}"
