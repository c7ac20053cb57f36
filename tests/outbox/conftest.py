"""An outbox by itself, and one in a database with all of Custody: the same code has to do for both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from tests.conftest import Clock
from tests.databases import Copy, Kept
from tests.outbox.web_service import Service

import custody
from custody.outbox import Outbox
from custody.relay import ClaimedEvent, Publisher, Relay


@pytest.fixture(scope="session")
def kept_alone(server_url: str) -> Iterator[Kept]:
    with closing(Copy(server_url)) as template:
        assert custody.outbox.install(template.url)
        with closing(Kept(server_url, template.name)) as made:
            yield made


@pytest.fixture
def alone_url(kept_alone: Kept) -> Iterator[str]:
    """A database with the outbox alone."""
    yield kept_alone.url
    kept_alone.recycle()


@pytest.fixture(params=["alone", "whole"])
def outbox_url(request: pytest.FixtureRequest) -> str:
    """Both kinds of databases, one after the other."""
    url: str = request.getfixturevalue("alone_url" if request.param == "alone" else "database_url")
    return url


@pytest.fixture
def outbox(outbox_url: str) -> Iterator[Outbox]:
    with Outbox(outbox_url, actor="test") as opened:
        yield opened


@pytest.fixture
def mine(outbox_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the application: a transaction begins with the first statement."""
    with psycopg.connect(outbox_url) as connection:
        yield connection
        connection.rollback()


class Collector(Publisher):
    """Keeps what it was given, and fails as it is told."""

    def __init__(self) -> None:
        self.events: list[ClaimedEvent] = []
        self.calls: list[ClaimedEvent] = []
        self.failing: dict[Any, Exception] = {}
        self.down: Exception | None = None

    def publish(self, event: ClaimedEvent) -> None:
        self.calls.append(event)
        if self.down is not None:
            raise self.down
        if event.payload in self.failing:
            raise self.failing[event.payload]
        self.events.append(event)

    @property
    def payloads(self) -> list[Any]:
        return [event.payload for event in self.events]


@pytest.fixture
def collector() -> Collector:
    return Collector()


@pytest.fixture
def relay(outbox_url: str, collector: Collector, clock: Clock) -> Iterator[Relay]:
    """A relay whose rounds the test runs by hand, with a clock that it moves."""
    made = Relay(
        outbox_url,
        {"test": collector},
        name="r1",
        max_attempts=3,
        retry_for="0s",
        backoff=custody.Constant("10s"),
        outage_backoff=custody.Constant("0s"),
        clock=clock,
    )
    yield made
    made.close()


def rounds(relay: Relay) -> None:
    """Rounds until nothing is due."""
    while relay.run_once():
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()
