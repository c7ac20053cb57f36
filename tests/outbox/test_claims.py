"""A relay's claims of the outbox: what it says of the events that it holds."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import custody
from custody.outbox import Outbox, State
from custody.relay import Claimed, Relay

pytestmark = pytest.mark.core


@pytest.mark.req("O5")
@pytest.mark.parametrize(
    ("text", "kept"),
    [("a\0b", "a\ufffdb"), ("a\ud800b", "a?b"), ("a" * 20_000, "a" * (10_000 - len("RuntimeError: ")))],
    ids=["zero byte", "lone surrogate", "long"],
)
def test_the_text_of_an_error_never_loses_an_outcome(
    outbox_url: str, outbox: Outbox, mine: psycopg.Connection[Any], text: str, kept: str
) -> None:
    event_id = custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    mine.commit()

    def publish(event: Claimed) -> None:
        raise RuntimeError(text)

    relay = Relay(outbox_url, {"test": publish})
    try:
        assert relay.run_once() == 1
    finally:
        relay.close()
    event = outbox.event(event_id)
    assert (event.status, event.attempts, event.last_error) == (State.PENDING, 1, f"RuntimeError: {kept}")
