"""One claim on its way: what is said of each event, whatever its publisher does."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from tests.outbox.conftest import Collector

import custody
from custody.errors import PublishRefused
from custody.outbox import EventState, Outbox
from custody.relay import ClaimedEvent, Relay, loop
from custody.relay.claims import OutboxClaims

pytestmark = pytest.mark.core


def write(connection: psycopg.Connection[Any], *payloads: int, key: str | None = None, to: str = "test:") -> None:
    for payload in payloads:
        custody.outbox.write(connection, event_type="e", payload=payload, destination=to, ordering_key=key)
    connection.commit()


class Unspeakable(Exception):
    """An error that cannot be printed."""

    def __str__(self) -> str:
        raise ValueError("nothing to say")


def cancelled(_: ClaimedEvent) -> None:
    raise asyncio.CancelledError


def unspeakable(_: ClaimedEvent) -> None:
    raise Unspeakable


@pytest.mark.req("O5", "O8")
@pytest.mark.parametrize(
    ("publish", "said"),
    [(lambda _: sys.exit(3), "SystemExit: 3"), (cancelled, "CancelledError: "), (unspeakable, "Unspeakable")],
    ids=["exit", "cancelled", "unspeakable"],
)
def test_whatever_a_publisher_raises_is_a_failure(
    alone_url: str, publish: Callable[[ClaimedEvent], object], said: str
) -> None:
    with psycopg.connect(alone_url) as mine:
        write(mine, 1)
    relay = Relay(alone_url, {"test": publish})
    round_ = threading.Thread(target=relay.run_once, daemon=True)
    round_.start()
    round_.join(20)
    assert not round_.is_alive(), "the relay waits for a word that never comes"
    relay.close()
    with Outbox(alone_url) as outbox:
        (event,) = outbox.events()
    assert (event.status, event.attempts, event.last_error) == (EventState.PENDING, 1, said)


@pytest.mark.req("O8", "O10")
def test_a_refusal_holds_its_key_until_it_is_written_down(
    alone_url: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a relay that dies in between would let the later event go first."""
    with psycopg.connect(alone_url) as mine:
        write(mine, 1, 2, key="k")
    collector.failing[1] = PublishRefused("not for now")

    class Dies(OutboxClaims):
        def settle(self, *_: Any) -> Any:
            raise RuntimeError("killed here")

    with monkeypatch.context() as patched:
        patched.setattr(loop, "OutboxClaims", Dies)
        first = Relay(alone_url, {"test": collector}, lease="100ms", poll="10ms")
    with pytest.raises(RuntimeError):
        first.drain("20s")
    first._db.close()  # as its death would
    collector.failing.clear()
    Relay(alone_url, {"test": collector}, poll="10ms").drain("20s")
    assert collector.payloads == [1, 2]
