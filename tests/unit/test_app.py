"""The registry of an app: what it takes, what it refuses at once, and which ticks are out of date."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

import custody
from custody.app import App, is_superseded
from custody.errors import InvalidArgument, ScheduleNotFound
from custody.model.schedule import SCHEDULE, SCHEDULED_AT, SUPERSEDED_AT

pytestmark = [pytest.mark.core, pytest.mark.req("X12")]

AT = datetime(2030, 1, 1, tzinfo=UTC)


def handle(message: custody.Message) -> None: ...


def test_it_knows_its_handlers_and_schedules() -> None:
    app = App("shop")

    @app.on("orders", group="stock", concurrency=3)
    async def stock(message: custody.Message) -> None: ...

    @app.every("5m")
    def refresh() -> None: ...

    @app.cron("0 6 * * *", tz="Europe/Berlin", name="daily.report", missed="catch_up")
    async def report(message: custody.Message) -> None: ...

    assert [*app.subscriptions] == ["orders/stock", "schedules/refresh", "schedules/daily.report"]
    assert app.subscriptions["orders/stock"].settings["concurrency"] == 3
    assert app.schedules["refresh"].timing.every == timedelta(minutes=5)
    daily = app.schedules["daily.report"]
    assert (daily.timing.cron, daily.timing.tz, daily.missed) == ("0 6 * * *", "Europe/Berlin", "catch_up")
    refresh()  # it stays a function


def test_one_function_may_handle_several_groups() -> None:
    app = App()
    assert app.on("orders", group="a")(app.on("orders", group="b")(handle)) is handle
    assert [*app.subscriptions] == ["orders/b", "orders/a"]


def generator(message: custody.Message) -> Any:
    yield


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (lambda app: app.on("orders", group="stock")(handle), "two handlers for group 'stock'"),
        (lambda app: app.every("1m", name="refresh")(handle), "two schedules 'refresh'"),
        (lambda app: app.every("1m", name="no name")(handle), "'no name' cannot be the name of a schedule"),
        (lambda app: app.every("1m")(lambda: None), "'<lambda>' cannot be the name"),
        (lambda app: app.every("1ms"), "shortest interval"),
        (lambda app: app.cron("soon"), "not a cron expression"),
        (lambda app: app.cron("@daily", tz="Mars"), "no time zone"),
        (lambda app: app.on("orders", group="g")(generator), "has a yield"),
        (lambda app: app.on("orders", group="g")(lambda: None), "takes"),
        (lambda app: app.on("orders", group="g", payload=complex | set), "cannot be decoded"),
        (lambda app: app._chosen(["ordrs/stock"]), "Did you mean 'orders/stock'"),
        (lambda _: App()._chosen([]), "no handlers"),
        (lambda _: App("a b"), "cannot be the name of an app"),
    ],
)
def test_what_could_not_run_is_refused_where_it_is_written(register: Callable[[App], object], said: str) -> None:
    app = App()
    app.on("orders", group="stock")(handle)
    app.every("1m", name="refresh")(handle)
    with pytest.raises(InvalidArgument, match=said):
        register(app)


def test_a_part_of_it_can_be_chosen() -> None:
    app = App()
    app.on("orders", group="stock")(handle)
    app.every("1m", name="refresh")(handle)
    assert [one.name for one in app._chosen(["refresh"])] == ["schedules/refresh"]
    assert [one.name for one in app._chosen(["orders/stock"])] == ["orders/stock"]
    assert len(app._chosen([])) == 2


@pytest.mark.parametrize(
    ("late", "last", "attempt", "superseded"),
    [
        (59, AT + timedelta(minutes=1), 1, False),  # in time
        (61, AT + timedelta(minutes=1), 1, True),
        (61, AT, 1, False),  # late, but there is no newer one: it runs
        (61, AT + timedelta(minutes=1), 2, False),  # a retry has run once
        (61, None, 1, False),  # the schedule is gone
    ],
)
def test_a_late_tick_is_out_of_date_if_there_is_a_newer_one(
    late: int, last: datetime | None, attempt: int, superseded: bool
) -> None:
    headers = {SCHEDULE: "refresh", SCHEDULED_AT: "2030-01-01T00:00:00Z", SUPERSEDED_AT: "2030-01-01T00:01:00Z"}
    tick = custody.Message(
        topic="t", partition=0, offset=0, key=None, payload=None, headers=headers, attempt=attempt, published_at=AT
    )

    def schedule(name: str) -> Any:
        assert name == "refresh"
        if last is None:
            raise ScheduleNotFound
        return SimpleNamespace(last_at=last)

    assert is_superseded(tick, schedule, lambda: AT + timedelta(seconds=late)) is superseded
