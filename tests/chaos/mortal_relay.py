"""A relay that ends itself with -9 at a chosen moment; its publisher fails at random.

Moment `event` N: the process dies of the event with the payload N, whenever it is published, and nothing else fails.

Arguments: database URL, name, what to publish to (`ledger`, or a topic), the moment, and after how many batches.
Moments: `claimed` (before the first publish of a batch), `published` (after one), `settling` (with a batch published
and not settled), `never`. Ends when nothing is left.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import psycopg

import custody
from custody.errors import PublisherUnavailable, PublishFailed
from custody.relay import ClaimedEvent, CustodyPublisher, Publisher, Relay, loop
from custody.relay.claims import OutboxClaims


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Moments:
    """When to die."""

    def __init__(self, moment: str, batches: int) -> None:
        self.moment, self.batches, self.batch = moment, batches, 0

    def reached(self, moment: str) -> None:
        if moment == self.moment and self.batch >= self.batches:
            die()


class Ledger(Publisher):
    """Writes to a table of its own, outside of the relay's transactions."""

    def __init__(self, url: str, name: str, moments: Moments) -> None:
        self._url, self._name, self._moments = url, name, moments
        self._local = threading.local()
        self._dice = random.Random(name)

    def publish(self, event: ClaimedEvent) -> None:
        self._moments.reached("claimed")
        chance = self._dice.random()
        if chance < 0.02:
            raise PublishFailed("by chance")
        if chance < 0.022:
            raise PublisherUnavailable("by chance")
        if not hasattr(self._local, "connection"):
            self._local.connection = psycopg.connect(self._url, autocommit=True)
        self._local.connection.execute(
            'INSERT INTO ledger ("offset", key, attempt, worker) VALUES (%s, %s, %s, %s)',
            (event.payload, event.key, event.attempts, self._name),
        )
        self._moments.reached("published")


class Deadly(Ledger):
    """Dies of one event."""

    def __init__(self, url: str, name: str, event: int) -> None:
        super().__init__(url, name, Moments("never", 0))
        self._event, self._dice = event, Unfailing()

    def publish(self, event: ClaimedEvent) -> None:
        if event.payload == self._event:
            die()
        super().publish(event)


class Unfailing(random.Random):
    def random(self) -> float:
        return 1.0


class Elsewhere(CustodyPublisher):
    def __init__(self, url: str, name: str, moments: Moments) -> None:
        super().__init__(url)
        self._moments, self._dice = moments, random.Random(name)

    def publish_many(self, events: Sequence[ClaimedEvent]) -> None:
        self._moments.reached("claimed")
        if self._dice.random() < 0.05:
            raise PublishFailed("by chance")
        super().publish_many(events)
        self._moments.reached("published")


def main(url: str, name: str, target: str, moment: str, batches: str) -> None:
    moments = Moments(moment, int(batches))
    deadly = moment == "event"
    publisher = (
        Deadly(url, name, int(batches))
        if deadly
        else Ledger(url, name, moments)
        if target == "ledger"
        else Elsewhere(url, name, moments)
    )

    class Mortal(OutboxClaims):
        def claim(self, most: int, **given: Any) -> Any:
            found = super().claim(most, **given)
            moments.batch += found.batch is not None
            return found

        def settle(self, batch: Any, results: Any) -> Any:
            moments.reached("settling")
            return super().settle(batch, results)

    loop.OutboxClaims = Mortal
    relay = Relay(
        url,
        {"chaos": publisher},
        name=name,
        batch=100 if deadly else 40,
        lease="1s" if deadly else "2s",
        max_attempts=3 if deadly else 100,
        backoff=custody.Exponential("5ms", cap="50ms", jitter=0.5),
        outage_backoff=custody.Constant("20ms"),
        poll="10ms",
    )
    print("ready", flush=True)
    relay.drain()


if __name__ == "__main__":
    main(*sys.argv[1:])
