"""A running app: what it creates, its handlers side by side, ticks that are handled once, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import psycopg
import pytest
from tests.waiting import wait_for

import custody
from custody import App, Policy
from custody.app import RunningApp
from custody.errors import SettingsDiffer, TopicNotFound
from custody.worker import WorkerSummary

pytestmark = pytest.mark.req("X12")


class Result:
    """What a running app returned or raised."""

    summaries: dict[str, WorkerSummary]
    error: BaseException | None = None


@contextmanager
def working(running: RunningApp) -> Iterator[Result]:
    result = Result()

    def run() -> None:
        try:
            result.summaries = running.run()
        except BaseException as error:
            result.error = error

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield result
    finally:
        running.stop()
        thread.join(30)
        assert not thread.is_alive()


def test_it_creates_what_is_missing_and_runs_all_handlers(live: custody.Custody) -> None:
    app, seen = App("shop"), []

    @app.on("orders", group="stock", partitions=2, policy=Policy(ordering="key"), payload=int)
    def stock(message: custody.Message) -> None:
        seen.append(("stock", message.payload))

    @app.on("orders", group="mail")
    async def mail(message: custody.Message) -> None:
        seen.append(("mail", message.payload))

    running = app.start(live)
    assert running.changes == [
        "created topic orders",
        "created group stock of topic orders",
        "created group mail of topic orders",
    ]
    assert live.topic("orders").partitions == 2
    assert live.group("orders", "stock").policy == Policy(ordering="key")
    with working(running) as result:
        live.publish_many("orders", [1, "x"])
        wait_for(lambda: all(live.stats("orders", group).depth == 0 for group in ("stock", "mail")), "all are handled")
    assert sorted(seen, key=str) == [("mail", "x"), ("mail", 1), ("stock", 1)]
    assert (result.summaries["orders/stock"].dead, result.summaries["orders/mail"].done) == (1, 2)
    assert app.start(live).changes == [], "the second start finds all of it"


def test_settings_that_cannot_be_changed_are_named(live: custody.Custody) -> None:
    live.create_topic("orders", partitions=4)
    app = App()
    app.on("orders", group="stock", partitions=2)(print)
    with pytest.raises(SettingsDiffer, match="partitions"):
        app.start(live)


def test_ticks_are_handled_by_one_of_two_processes(live: custody.Custody, database: object) -> None:
    seen: list[str] = []

    def made() -> App:
        app = App("shop")

        @app.every("1s")
        def refresh(message: custody.Message) -> None:
            seen.append(message.headers["x-custody-scheduled-at"])

        return app

    with custody.connect(live.database_url, worker="other") as other:
        first, second = made().start(live), made().start(other)
        assert live.topic("schedules").retention is not None
        with working(first), working(second):
            wait_for(lambda: len(seen) >= 3, "three ticks are handled")
            assert live.schedule("refresh").state == "active"
    assert len(seen) == len(set(seen))
    schedule = live.schedule("refresh")
    assert schedule.last_at is not None
    assert schedule.next_at == schedule.last_at + timedelta(seconds=1)


def test_what_an_operator_edits_survives_a_restart_and_is_named(live: custody.Custody) -> None:
    app = App("shop")
    app.every("1h", name="refresh")(print)
    assert app.start(live).changes == ["created topic schedules", "created group refresh of topic schedules"]
    live.change_schedule("refresh", every="2h")
    assert app.start(live).changes == ["schedule refresh is not as in the code: an operator has edited it"]
    assert live.schedule("refresh").every == timedelta(hours=2)


def test_a_schedule_without_code_is_named(live: custody.Custody, caplog: pytest.LogCaptureFixture) -> None:
    before = App("shop")
    for name in ("kept", "gone"):
        before.every("1h", name=name)(print)
    before.start(live)
    after = App("shop")
    after.every("1h", name="kept")(print)
    after.start(live)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "schedule gone of app shop has no code here"
    ]


def test_the_newest_of_the_ticks_that_wait_is_handled_and_the_others_are_skipped(live: custody.Custody) -> None:
    app, seen = App("shop"), []

    @app.every("1h")
    def refresh(message: custody.Message) -> None:
        seen.append(message.offset)

    running = app.start(live)
    with psycopg.connect(live.database_url, autocommit=True) as connection:
        for hours in (30, 20, 10):  # ticks that were published in time, while no handler ran
            connection.execute(
                "UPDATE custody.schedules SET next_at = now() - make_interval(hours => %s), last_at = NULL", [hours]
            )
            connection.execute(
                "SELECT custody.publish_ticks(name, revision, ARRAY[next_at], ARRAY[json_build_object("
                "'x-custody-schedule', name, 'x-custody-scheduled-at', next_at, "
                "'x-custody-superseded-at', next_at + every)::text], now() + every) FROM custody.schedules"
            )
    with working(running) as result:
        wait_for(lambda: live.stats("schedules", "refresh").depth == 0, "the ticks are resolved")
    assert seen == [2]
    assert (result.summaries["schedules/refresh"].done, result.summaries["schedules/refresh"].skipped) == (1, 2)


def test_one_handler_that_cannot_go_on_stops_the_app_with_its_error(live: custody.Custody) -> None:
    app = App()
    app.on("orders", group="stock")(print)
    app.on("others", group="stock")(print)
    with working(app.start(live)) as result:
        live.delete_topic("others")
        wait_for(lambda: result.error is not None, "the app has ended")
    assert isinstance(result.error, TopicNotFound)


@pytest.mark.own_database
def test_all_handlers_share_one_connection_for_wakeups(live: custody.Custody) -> None:
    app, seen = App(), []
    for topic in ("a", "b", "c"):
        app.on(topic, group="g")(lambda message: seen.append(message.topic))

    def listeners() -> int:
        with psycopg.connect(live.database_url) as connection:
            row = connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'custody listener' "
                "AND datname = current_database()"
            ).fetchone()
        return 0 if row is None else int(row[0])

    with working(app.start(live)):
        for topic in ("a", "b", "c"):
            live.publish(topic, 1)
        wait_for(lambda: sorted(seen) == ["a", "b", "c"], "each has its message")
        assert listeners() == 1
    wait_for(lambda: listeners() == 0, "it has ended with the workers")
