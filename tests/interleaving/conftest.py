"""Sessions side by side on one small topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from tests.conftest import Clock
from tests.interleaving.session import GROUP, TOPIC, Session

import custody

Make = Callable[..., None]


@pytest.fixture
def session(database_url: str, clock: Clock) -> Iterator[Callable[[str], Session]]:
    """Opens another session; all are closed at the end, whatever they wait for."""
    with ExitStack() as open_sessions:
        yield lambda name: open_sessions.enter_context(closing(Session(database_url, clock, name=name)))


@pytest.fixture
def one(session: Callable[[str], Session]) -> Session:
    return session("one")


@pytest.fixture
def two(session: Callable[[str], Session]) -> Session:
    return session("two")


@pytest.fixture
def three(session: Callable[[str], Session]) -> Session:
    return session("three")


@pytest.fixture
def make(c: custody.Custody) -> Make:
    """Makes the topic, publishes one message for each key to partition 0, and makes the ordered group."""

    def _make(keys: str | list[str | None] = "", *, partitions: int = 1, group: bool = True, **policy: object) -> None:
        c.create_topic(TOPIC, partitions=partitions)
        if keys:
            messages = [
                custody.Outgoing({"n": n}, key=key, partition=0, allow_split=True) for n, key in enumerate(keys)
            ]
            c.publish_many(TOPIC, messages)
        if group:
            c.create_group(TOPIC, GROUP, custody.Policy(**{"ordering": "key", **policy}))  # type: ignore[arg-type]

    return _make
