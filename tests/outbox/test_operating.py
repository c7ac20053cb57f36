"""Looking at an outbox, and repairing it."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
from tests.conftest import Clock
from tests.outbox.conftest import Collector, rounds

import custody
from custody.errors import InvalidArgument
from custody.outbox import EventState, Outbox
from custody.outbox.metrics import exposition
from custody.relay import Relay

pytestmark = [pytest.mark.core, pytest.mark.req("O11")]


@pytest.fixture
def operator(outbox_url: str, clock: Clock) -> Any:
    with Outbox(outbox_url, actor="ann", clock=clock) as opened:
        yield opened


@pytest.fixture
def events(mine: psycopg.Connection[Any], relay: Relay, collector: Collector, clock: Clock) -> list[UUID]:
    """0 to 2 are dead, 3 to 5 published, 6 is pending."""
    collector.failing = {n: custody.errors.PublishRefused(f"error {n}") for n in range(3)}
    found = []
    for n in range(7):
        row = mine.execute(
            "SELECT custody.outbox_add('e', 'j', %s, 'test:', p_ordering_key => 'k', p_now => %s)",
            [str(n).encode(), clock()],
        ).fetchone()
        assert row is not None
        found.append(row[0])
        mine.commit()
        if n < 6:
            rounds(relay)
        clock.move(60)
    return found


def test_events_by_state_time_and_error(operator: Outbox, events: list[UUID], clock: Clock) -> None:
    def payloads(**which: Any) -> list[int]:
        return [event.payload for event in operator.events(**which)]

    assert payloads(states=["DEAD"]) == [0, 1, 2]
    assert payloads(states=[EventState.PENDING, EventState.PUBLISHED]) == [3, 4, 5, 6]
    assert payloads(since=clock() - timedelta(seconds=180), until=clock() - timedelta(seconds=60)) == [4, 5]
    assert payloads(error="error %") == [0, 1, 2]
    assert payloads(destination="other:") == []
    assert payloads(event_type="e", limit=2) == [0, 1]
    assert operator.audit() == [], "looking left a record"


def test_a_replay_of_many_keeps_the_order_and_leaves_a_record(
    operator: Outbox, events: list[UUID], relay: Relay, collector: Collector
) -> None:
    collector.failing, collector.events = {}, []
    both = ["DEAD", "PUBLISHED"]
    assert operator.replay(states=both, ids=events[1:5], dry_run=True) == events[1:5]
    assert operator.replay(states=both, ids=events[1:5], reason="mended") == events[1:5]
    rounds(relay)
    assert collector.payloads == [1, 2, 3, 4, 6], "of a key the earlier one goes first"
    (record,) = operator.audit()
    assert (record["actor"], record["action"], record["reason"], record["events"]) == ("ann", "replay", "mended", 4)
    assert operator.event(events[1]).last_error == "error 1"
    assert [operator.event(event).replays for event in events[1:5]] == [0, 0, 1, 1]


def test_only_what_has_ended_can_be_replayed(operator: Outbox, events: list[UUID]) -> None:
    with pytest.raises(InvalidArgument, match="PUBLISHED or DEAD"):
        operator.replay(states=["PENDING"])
    assert operator.replay(states=["DEAD", "PUBLISHED"], ids=events[6:]) == []


def test_pruning_by_age(operator: Outbox, events: list[UUID]) -> None:
    assert operator.prune("130s", dry_run=True) == 2
    assert operator.prune("130s") == 2
    assert [event.payload for event in operator.events()] == [0, 1, 2, 5, 6]
    assert operator.prune("0s", states=["DEAD", "PUBLISHED"], reason="all") == 4
    assert [event.payload for event in operator.events()] == [6], "what is pending stays, whatever its age"
    assert [record["events"] for record in operator.audit()] == [4, 2]
    assert [record["events"] for record in operator.audit(limit=1)] == [4], "the latest counts most"
    with pytest.raises(InvalidArgument):
        operator.prune("0s", states=["PENDING"])


@pytest.mark.req("O12")
def test_figures_and_metrics(operator: Outbox, events: list[UUID], clock: Clock) -> None:
    (found,) = operator.stats("200s")
    assert (found.destination, found.backlog, found.due, found.claimed, found.dead) == ("test:", 1, 1, 0, 3)
    assert (found.published_recently, found.died_recently, found.failures) == (2, 0, 3)
    assert found.oldest_pending == clock() - timedelta(seconds=60)
    alike = [replace(found, destination=f"https://{user}@example.org/") for user in ("ann", "bob")]
    lines = exposition([found, *alike], clock()).splitlines()
    assert 'custody_outbox_backlog{destination="https://example.org/"} 2' in lines, "of the two there is one series"
    assert 'custody_outbox_backlog{destination="test:"} 1' in lines
    assert 'custody_outbox_oldest_seconds{destination="test:"} 60.0' in lines


@pytest.mark.req("O12")
def test_an_event_for_later_waits_since_its_time_has_come(
    operator: Outbox, mine: psycopg.Connection[Any], relay: Relay, collector: Collector, clock: Clock
) -> None:
    """It is not late before, and late by no more than it is; so is one that fails again and again."""

    def oldest() -> float | None:
        (found,) = operator.stats()
        return None if found.oldest_pending is None else (clock() - found.oldest_pending).total_seconds()

    mine.execute(
        "SELECT custody.outbox_add('e', 'j', '1', 'test:', p_available_at => %s, p_now => %s)",
        [clock() + timedelta(hours=1), clock()],
    )
    mine.commit()
    clock.move(3599)
    assert (operator.stats()[0].backlog, operator.stats()[0].due, oldest()) == (1, 0, None)
    clock.move(11)
    assert (operator.stats()[0].due, oldest()) == (1, 10)
    collector.failing = {1: custody.errors.PublishFailed("not now")}
    rounds(relay)
    clock.move(5)
    assert (operator.stats()[0].due, oldest()) == (0, 15)
