"""Two processes at the same tick: it is published once, whatever they do at the same time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.conftest import Clock
from tests.databases import Copy, Kept
from tests.interleaving.session import TOPIC, Session

import custody
from custody.model.schedule import SCHEDULE, SCHEDULED_AT

pytestmark = [pytest.mark.core, pytest.mark.req("X12")]

DUE = datetime(2030, 1, 1, 0, 1, tzinfo=UTC)
NEXT = DUE + timedelta(minutes=1)
Sessions = Callable[[str], Session]


@pytest.fixture(autouse=True)
def scheduled(c: custody.Custody, clock: Clock) -> None:
    c.create_topic(TOPIC)
    c.create_schedule("refresh", topic=TOPIC, every="1m")
    clock.move(60)


def tick(session: Session, clock: Clock, revision: int = 0) -> list[tuple[Any, ...]]:
    return session.call(
        "publish_ticks", name="refresh", revision=revision, times=[DUE], headers=["{}"], next_at=NEXT, now=clock()
    )


def test_the_second_of_two_publishes_nothing_and_does_not_wait(
    one: Session, two: Session, clock: Clock, c: custody.Custody
) -> None:
    assert len(tick(one, clock)) == 1
    assert tick(two, clock) == [], "the first one has the row"
    one.commit()
    assert tick(two, clock) == [], "it has another revision now"
    two.commit()
    assert len(c.read(TOPIC)) == 1


def test_a_tick_that_is_rolled_back_is_due_for_another(
    one: Session, two: Session, clock: Clock, c: custody.Custody
) -> None:
    tick(one, clock)
    assert c.tick() == 0, "somebody is at it"
    one.rollback()
    assert c.tick() == 60
    assert len(c.read(TOPIC)) == 1


def test_an_edit_waits_for_a_tick_and_comes_after_it(one: Session, clock: Clock, c: custody.Custody) -> None:
    tick(one, clock)
    with ThreadPoolExecutor() as pool:
        editing = pool.submit(c.change_schedule, "refresh", every="5m")
        one.commit()
        changed = editing.result(30)
    assert changed.last_at == DUE
    assert changed.next_at == DUE + timedelta(minutes=5)


def test_a_tick_of_a_schedule_that_was_edited_or_paused_meanwhile_is_not_published(
    one: Session, clock: Clock, c: custody.Custody
) -> None:
    c.change_schedule("refresh", every="5m")
    assert tick(one, clock) == []
    one.rollback()
    c.pause_schedule("refresh")
    assert tick(one, clock, revision=2) == []
    one.rollback()
    assert c.read(TOPIC) == []


def test_two_edits_at_once_are_both_there(one: Session, clock: Clock, c: custody.Custody) -> None:
    one.call("pause_schedule", name="refresh", now=clock())
    with ThreadPoolExecutor() as pool:
        editing = pool.submit(c.change_schedule, "refresh", payload="new")
        one.commit()
        changed = editing.result(30)
    assert (changed.state, changed.payload) == ("paused", "new")


def test_many_clients_publish_each_tick_once(database: Kept | Copy, c: custody.Custody, clock: Clock) -> None:
    c.create_schedule("all", topic=TOPIC, every="1s", missed="catch_up")
    c.create_schedule("growing", topic=TOPIC, cron="* * * * * *", missed="catch_up")
    with (
        ThreadPoolExecutor(4) as pool,
        database.custody(worker="a", clock=clock) as a,
        database.custody(worker="b", clock=clock) as b,
    ):
        for _ in range(20):
            clock.move(17)
            for running in [pool.submit(client.tick) for client in (a, b, a, b)]:
                running.result(30)
    c.tick()
    found = [(one.headers[SCHEDULE], one.headers[SCHEDULED_AT]) for one in c.read(TOPIC, max_messages=1000)]
    assert len(found) == len(set(found))
    assert sum(name == "all" for name, _ in found) == 17 * 20
    assert sum(name == "growing" for name, _ in found) == 17 * 20
