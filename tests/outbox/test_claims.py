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
from custody.outbox import EventState, Outbox
from custody.relay import ClaimedEvent, Relay
from custody.store.postgres import run_function
from custody.verbs.settle import LONGEST_ERROR

pytestmark = pytest.mark.core


@pytest.mark.req("O5")
@pytest.mark.parametrize(
    ("text", "kept"),
    [("a\0b", "a\ufffdb"), ("a\ud800b", "a?b"), ("a" * 20_000, "a" * (LONGEST_ERROR - len("RuntimeError: ")))],
    ids=["zero byte", "lone surrogate", "long"],
)
def test_the_text_of_an_error_never_loses_an_outcome(
    outbox_url: str, outbox: Outbox, mine: psycopg.Connection[Any], text: str, kept: str
) -> None:
    event_id = custody.outbox.write(mine, event_type="e", payload=1, destination="test:")
    mine.commit()

    def publish(event: ClaimedEvent) -> None:
        raise RuntimeError(text)

    relay = Relay(outbox_url, {"test": publish})
    try:
        assert relay.run_once() == 1
    finally:
        relay.close()
    event = outbox.event(event_id)
    assert (event.status, event.attempts, event.last_error) == (EventState.PENDING, 1, f"RuntimeError: {kept}")


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
    assert (outbox.event(event).status, outbox.event(event).attempts) == (EventState.DEAD, 1)


@pytest.mark.req("O6", "O10")
@pytest.mark.parametrize(("hold", "then"), [(True, []), (False, [2])])
def test_what_dies_of_age_in_a_claim_holds_its_key_or_lets_it_go_on(
    outbox: Outbox, mine: psycopg.Connection[Any], clock: Clock, claim: Claim, hold: bool, then: list[int]
) -> None:
    old = add(mine, clock, 1, ordering_key="k")
    clock.move(3601)
    add(mine, clock, 2, ordering_key="k")
    assert claim(max_age="1 h", hold=hold) == then
    assert outbox.event(old).status is EventState.DEAD
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
    assert (outbox.event(event).status, outbox.event(event).attempts) == (EventState.CLAIMED, 1)


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
    assert {event.status for event in outbox.events()} == {EventState.PUBLISHED}


@pytest.mark.req("X4", "O6", "O10")
def test_after_an_expiry_claims_are_a_tenth_the_size_and_only_the_last_event_is_charged(
    outbox: Outbox, mine: psycopg.Connection[Any], clock: Clock, claim: Claim
) -> None:
    for payload in range(1, 51):
        add(mine, clock, payload, ordering_key="k" if payload in (2, 4) else None)
    assert claim(max=50) == list(range(1, 51))
    clock.move(31)
    add(mine, clock, 51)
    assert claim(max=60, alone=False) == [1, 2, 3, 4, 5], "suspects come first, and among themselves"
    assert claim(max=60, alone=False) == [6, 7, 8, 9, 10]
    assert claim(max=60, after=50, alone=False) == [51], "others go on beside them"
    clock.move(31)
    assert claim(max=60, alone=False) == [11, 12, 13, 14, 15], "a busy relay got what has to be alone"
    assert [claim(max=60), claim(max=60), claim(max=60)] == [[1], [2], [3]]
    assert claim(max=60) == [5], "the key was overtaken"
    clock.move(31)
    assert claim(max=60) == [1]
    found = mine.execute("SELECT convert_from(payload, 'UTF8')::int, crashes, attempts FROM custody.outbox").fetchall()
    assert {payload: attempts for payload, crashes, attempts in found if crashes} == {1: 3, 2: 3, 3: 3, 5: 3}
    clock.move(31)
    assert claim(max=60) == [1]
    clock.move(31)
    assert claim(max=60) == [2], "the third crash was not the last"
    assert [event.payload for event in outbox.events(states=["DEAD"])] == [1]


@pytest.mark.req("X4")
def test_what_is_released_stays_a_suspect_and_what_was_tried_does_not(
    mine: psycopg.Connection[Any], clock: Clock, claim: Claim
) -> None:
    for payload in range(1, 21):
        add(mine, clock, payload)
    assert len(claim(max=20)) == 20
    clock.move(31)
    given = {"relay": "r", "max": 20, "lease": "30 s", "max_attempts": 3, "now": clock()}
    _, first, second = run_function(mine, "outbox_claim", given)
    assert (first[15], second[15]) == (2, 2)
    settle = {"claim": first[12], "ids": [first[0], second[0]], "outcomes": ["released", "failed"], "errors": None}
    run_function(mine, "outbox_settle", {**settle, "delays": None, "max_attempts": 3, "now": clock()})
    mine.commit()
    suspects = mine.execute("SELECT suspect FROM custody.outbox ORDER BY id LIMIT 2").fetchall()
    assert suspects == [(2,), (None,)]
