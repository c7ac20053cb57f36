"""A relay's claims of the outbox: which events it gets, and what it says of those that it holds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from tests.conftest import Clock

import custody
from custody.outbox import Outbox, State
from custody.relay import Claimed, Relay
from custody.store.postgres import run_function

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


Claim = Callable[..., list[int]]


@pytest.fixture
def claim(mine: psycopg.Connection[Any], clock: Clock) -> Claim:
    """A claim of ten events of the test's destination at the test's time: their payloads."""

    def claim(relay: str = "r", lease: str = "30 s", max_attempts: int = 3, **given: Any) -> list[int]:
        arguments = {"relay": relay, "max": 10, "lease": lease, "max_attempts": max_attempts, "now": clock()}
        _, *rows = run_function(mine, "outbox_claim", {"names": ["test"], **arguments, **given})
        mine.commit()
        return sorted(int(row[5]) for row in rows)

    return claim


def add(mine: psycopg.Connection[Any], clock: Clock, payload: int, **given: Any) -> UUID:
    arguments = {"event_type": "e", "kind": "j", "payload": str(payload).encode(), "destination": "test:"}
    ((event_id,),) = run_function(mine, "outbox_add", {**arguments, "now": clock(), **given})
    mine.commit()
    return UUID(str(event_id))


@pytest.mark.req("O6")
def test_the_age_of_an_event_for_later_counts_from_its_time(
    outbox: Outbox, mine: psycopg.Connection[Any], clock: Clock, claim: Claim
) -> None:
    event = add(mine, clock, 1, available_at=clock() + timedelta(hours=2))
    clock.move(2 * 3600)
    assert claim(max_age="1 h") == [1], "it was dead before its first attempt"
    clock.move(3601)
    assert claim(max_age="1 h") == []
    assert (outbox.event(event).status, outbox.event(event).attempts) == (State.DEAD, 1)


@pytest.mark.req("O6", "O10")
@pytest.mark.parametrize(("hold", "then"), [(True, []), (False, [2])])
def test_what_dies_of_age_in_a_claim_holds_its_key_or_lets_it_go_on(
    outbox: Outbox, mine: psycopg.Connection[Any], clock: Clock, claim: Claim, hold: bool, then: list[int]
) -> None:
    old = add(mine, clock, 1, ordering_key="k")
    clock.move(3601)
    add(mine, clock, 2, ordering_key="k")
    assert claim(max_age="1 h", hold=hold) == then
    assert outbox.event(old).status is State.DEAD
    assert claim(max_age="1 h", hold=hold) == []


@pytest.mark.req("O5", "O6")
def test_only_a_relay_that_serves_a_destination_ends_its_expired_claims(
    outbox: Outbox, mine: psycopg.Connection[Any], clock: Clock, claim: Claim
) -> None:
    """Its limit counts, not the one of whoever passes by."""
    event = add(mine, clock, 1)
    assert claim("one", max_attempts=3) == [1]
    clock.move(31)
    assert claim("other", max_attempts=1, names=["other"]) == []
    assert mine.execute(
        "SELECT destination, events FROM custody.outbox_unserved('{other}', %s)", [clock()]
    ).fetchall() == [("test:", 1)]
    assert claim("two", max_attempts=3) == [1]
    assert (outbox.event(event).status, outbox.event(event).attempts) == (State.CLAIMED, 1)


@pytest.mark.req("O7", "O10")
def test_what_lies_behind_a_locked_event_of_its_key_is_settled_with_it(
    outbox: Outbox, outbox_url: str, mine: psycopg.Connection[Any], clock: Clock
) -> None:
    """Else the first could expire, and would be published again behind the second."""
    for payload, key in ((1, "a"), (2, "a"), (3, "b"), (4, None)):
        add(mine, clock, payload, ordering_key=key)
    given = {"relay": "r", "max": 10, "lease": "30 s", "max_attempts": 3, "now": clock()}
    _, *rows = run_function(mine, "outbox_claim", given)
    mine.commit()
    ids = sorted(row[0] for row in rows)
    claim = {"claim": rows[0][12], "ids": ids, "now": clock()}
    settle = {**claim, "outcomes": ["published"] * 4, "errors": None, "delays": None, "max_attempts": 3}
    with psycopg.connect(outbox_url) as operator:
        operator.execute("SELECT FROM custody.outbox WHERE id = %s FOR UPDATE", ids[:1])
        kept = run_function(mine, "outbox_extend", {**claim, "lease": "60 s"})
        assert sorted(kept) == [(id,) for id in ids[2:]]
        states = dict(run_function(mine, "outbox_settle", settle))
        assert [states[id] for id in ids] == ["CLAIMED", "CLAIMED", "PUBLISHED", "PUBLISHED"]
        mine.commit()
    run_function(mine, "outbox_settle", settle)
    mine.commit()
    assert {event.status for event in outbox.events()} == {State.PUBLISHED}
