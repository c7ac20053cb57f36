"""Schedules, by either way: settings, pause and resume, ticks once, what is missed, what fails, who attends them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from tests.conformance.conftest import refused
from tests.conftest import Clock
from tests.waiting import wait_for

import custody
from custody.model.schedule import RUN_BY, SCHEDULE, SCHEDULED_AT, SUPERSEDED_AT

pytestmark = [pytest.mark.core, pytest.mark.req("X12")]

START = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def jobs(c: custody.Custody) -> None:
    c.create_topic("jobs", partitions=3)


def ticks(c: custody.Custody, topic: str = "jobs") -> list[custody.Message]:
    """What was published, in the order of the times."""
    found = [
        one for partition in range(c.topic(topic).partitions) for one in c.read(topic, partition, max_messages=1000)
    ]
    return sorted(found, key=lambda one: (one.headers[SCHEDULED_AT], one.partition, one.offset))


def times(c: custody.Custody) -> list[str]:
    """The times of the ticks, as minutes and seconds."""
    return [tick.headers[SCHEDULED_AT][14:19] for tick in ticks(c)]


def test_a_schedule_has_its_settings_and_its_next_time(c: custody.Custody) -> None:
    made = c.create_schedule(
        "report",
        topic="jobs",
        cron="0 6 * * mon-fri",
        tz="Europe/Berlin",
        payload={"price": Decimal("1.10")},
        key="k",
        headers={"source": "test"},
        missed="catch_up",
    )
    assert made == c.schedule("report")
    assert c.schedules() == [made]
    assert (made.topic, made.every, made.cron, made.tz, made.missed) == (
        *("jobs", None, "0 6 * * mon-fri", "Europe/Berlin", "catch_up"),
    )
    assert (made.payload, made.key, made.headers) == ({"price": "1.10"}, "k", {"source": "test"})
    assert (made.state, made.edited, made.created_at, made.last_at) == ("active", False, START, None)
    assert made.next_at == datetime(2030, 1, 1, 5, tzinfo=UTC)


def test_a_tick_is_a_message_with_its_time_and_is_published_once(
    c: custody.Custody, direct: custody.Custody, clock: Clock
) -> None:
    c.create_schedule("refresh", topic="jobs", every="1m", payload="go", key="k", headers={"source": "test"})
    assert direct.tick() == 60
    clock.move(60)
    assert direct.tick() == 60
    assert direct.tick() == 60
    (tick,) = ticks(c)
    assert (tick.payload, tick.key) == ("go", "k")
    assert tick.headers == {
        "source": "test",
        SCHEDULE: "refresh",
        SCHEDULED_AT: "2030-01-01T00:01:00Z",
        SUPERSEDED_AT: "2030-01-01T00:02:00Z",
    }
    clock.move(75)
    assert direct.tick() == 45
    assert times(c) == ["01:00", "02:00"], "an interval does not drift"
    assert c.schedule("refresh").last_at == START + timedelta(minutes=2)


def test_of_what_was_missed_the_newest_is_published_or_everything(
    c: custody.Custody, direct: custody.Custody, clock: Clock
) -> None:
    c.create_schedule("skipping", topic="jobs", every="1m")
    c.create_schedule("catching", topic="jobs", cron="* * * * *", missed="catch_up")
    clock.move(150 * 60 + 30)
    assert direct.tick() == 30
    found = ticks(c)
    caught = [tick.headers[SCHEDULED_AT] for tick in found if tick.headers[SCHEDULE] == "catching"]
    assert len(caught) == len(set(caught)) == 150
    offsets = [(tick.partition, tick.offset) for tick in found if tick.headers[SCHEDULE] == "catching"]
    assert offsets == sorted(offsets), "in one partition, in their order"
    assert all(SUPERSEDED_AT not in tick.headers for tick in found if tick.headers[SCHEDULE] == "catching")
    (newest,) = [tick for tick in found if tick.headers[SCHEDULE] == "skipping"]
    assert newest.headers[SCHEDULED_AT] == "2030-01-01T02:30:00Z"


def test_a_paused_schedule_does_not_tick_and_what_was_due_meanwhile_is_not_published(
    c: custody.Custody, direct: custody.Custody, clock: Clock
) -> None:
    c.create_schedule("refresh", topic="jobs", cron="* * * * *", missed="catch_up")
    assert c.pause_schedule("refresh", reason="maintenance") is True
    assert c.pause_schedule("refresh") is False
    paused = c.schedule("refresh")
    assert (paused.state, paused.paused_reason, paused.paused_at) == ("paused", "maintenance", START)
    clock.move(600)
    assert direct.tick() is None
    assert c.resume_schedule("refresh") is True
    assert c.resume_schedule("refresh") is False
    assert direct.tick() == 60
    clock.move(60)
    direct.tick()
    assert times(c) == ["11:00"]
    assert c.schedule("refresh").state == "active"


def test_it_runs_now_also_while_it_is_paused(c: custody.Custody, clock: Clock) -> None:
    c.create_schedule("refresh", topic="jobs", every="1h", payload={"n": 1})
    c.pause_schedule("refresh")
    clock.move(5)
    receipt = c.run_schedule("refresh")
    (tick,) = ticks(c)
    assert (tick.partition, tick.offset) == (receipt.partition, receipt.offset)
    assert tick.payload == {"n": 1}
    assert tick.headers == {SCHEDULE: "refresh", SCHEDULED_AT: "2030-01-01T00:00:05Z", RUN_BY: "test"}
    assert c.schedule("refresh").next_at == START + timedelta(hours=1)
    assert c.schedule("refresh").last_at is None


def test_an_edit_changes_what_it_names_and_counts_from_now(c: custody.Custody, clock: Clock) -> None:
    c.create_schedule("refresh", topic="jobs", every="1h", payload=1, key="k")
    clock.move(60)
    changed = c.change_schedule("refresh", payload=2)
    assert (changed.payload, changed.key, changed.next_at) == (2, "k", START + timedelta(hours=1))
    assert changed.edited
    assert c.change_schedule("refresh", every="10m").next_at == START + timedelta(minutes=11)
    cron = c.change_schedule("refresh", cron="30 * * * *", key=None)
    assert (cron.every, cron.cron, cron.key, cron.next_at) == (None, "30 * * * *", None, START + timedelta(minutes=30))
    assert c.change_schedule("refresh", every="1h", payload=1, key="k").edited is False


def test_what_an_operator_edits_stays_until_the_code_changes(c: custody.Custody) -> None:
    def declare(**settings: Any) -> Any:
        return c.ensure_schedule("refresh", topic="jobs", app="shop", **settings)

    assert declare(every="1m").app == "shop"
    c.change_schedule("refresh", every="5m")
    assert declare(every="1m").every == timedelta(minutes=5), "the code says what it said before"
    assert c.schedule("refresh").edited
    changed = declare(every="2m")
    assert (changed.every, changed.edited) == (timedelta(minutes=2), False)
    moved = c.ensure_schedule("refresh", topic="jobs", app="other", every="2m")
    assert moved.app == "other"


def test_a_tick_that_cannot_be_published_is_reported_and_tried_again(
    c: custody.Custody, direct: custody.Custody, clock: Clock
) -> None:
    c.create_schedule("refresh", topic="jobs", every="1m")
    c.create_topic("others")
    c.create_schedule("other", topic="others", every="1m")
    c.delete_topic("jobs")
    clock.move(60)
    assert direct.tick() == 10
    found = c.schedule("refresh")
    assert (found.state, found.failed_at) == ("failing", clock())
    assert "there is no topic 'jobs'" in (found.last_error or "")
    assert len(ticks(c, "others")) == 1, "it does not disturb others"
    c.create_topic("jobs")
    clock.move(5)
    assert direct.tick() == 5, "not at once again"
    clock.move(5)
    direct.tick()
    assert times(c) == ["01:00"]
    assert (c.schedule("refresh").state, c.schedule("refresh").last_error) == ("active", None)


def test_a_schedule_whose_app_or_code_is_gone_is_seen(c: custody.Custody, clock: Clock) -> None:
    for name in ("kept", "gone"):
        c.ensure_schedule(name, topic="jobs", every="1h", app="shop")
    c.create_schedule("free", topic="jobs", every="1h")
    assert [one.state for one in c.schedules()] == ["active", "unattended", "unattended"]
    assert c.attend_schedules("shop", ["kept"]) == ["gone"]
    assert {one.name: one.state for one in c.schedules()} == {"free": "active", "gone": "unattended", "kept": "active"}
    clock.move(121)
    assert c.schedule("kept").state == "unattended"
    clock.move(3600)
    assert [one.state for one in c.schedules()] == ["late", "late", "late"], "nobody ticks"


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"every": "1m", "cron": "* * * * *"}, "invalid_argument"),
        ({}, "invalid_argument"),
        ({"cron": "tomorrow"}, "invalid_argument"),
        ({"every": "0.5s"}, "invalid_argument"),
        ({"every": "1m", "tz": "Mars"}, "invalid_argument"),
        ({"every": "1m", "missed": "both"}, "invalid_argument"),
        ({"every": "1m", "payload": b"bytes"}, "invalid_payload"),
        ({"every": "1m", "payload": {1, 2}}, "invalid_payload"),
        ({"every": "1m", "headers": {"a": 1}}, "invalid_payload"),
        ({"every": "1m", "topic": "nowhere"}, "topic_not_found"),
    ],
    ids=str,
)
def test_what_cannot_be_a_schedule_is_refused(c: custody.Custody, given: dict[str, Any], code: str) -> None:
    with refused(code):
        c.create_schedule("refresh", **{"topic": "jobs", **given})
    c.create_schedule("refresh", topic="jobs", every="1m")
    if given:
        with refused(code):
            c.change_schedule("refresh", **given)


def test_names(c: custody.Custody) -> None:
    c.create_schedule("refresh", topic="jobs", every="1m")
    with refused("schedule_exists"):
        c.create_schedule("refresh", topic="jobs", every="1m")
    c.delete_schedule("refresh")
    for call in (c.schedule, c.delete_schedule, c.pause_schedule, c.resume_schedule, c.run_schedule, c.change_schedule):
        with refused("schedule_not_found"):
            call("refresh")
    with refused("invalid_argument"):
        c.create_schedule("a b", topic="jobs", every="1m")


def test_a_server_and_a_worker_publish_ticks(c: custody.Custody, direct: custody.Custody, clock: Clock) -> None:
    c.create_schedule("refresh", topic="jobs", every="1s")
    clock.move(3600)
    with direct.ticking():
        wait_for(lambda: len(ticks(c)) == 1, "the tick is published")
