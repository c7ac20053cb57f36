"""Times of schedules: intervals, cron expressions, time zones with their jumps, and what is missed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from custody.errors import InvalidArgument
from custody.model.schedule import AT_ONCE, Timing, preview, utc_text

pytestmark = [pytest.mark.core, pytest.mark.req("X12")]

BERLIN = ZoneInfo("Europe/Berlin")
START = datetime(2030, 1, 1, tzinfo=UTC)


def local(cron: str, after: datetime, count: int, tz: str = "Europe/Berlin") -> list[str]:
    """The next times on the clock of the time zone, with its offset from UTC."""
    zone = ZoneInfo(tz)
    return [f"{at.astimezone(zone):%m-%d %H:%M%z}" for at in preview(Timing(cron=cron, tz=tz), after, count)]


def test_an_interval_counts_from_the_time_before() -> None:
    assert preview(Timing.of("90s", None, "UTC"), START, 2) == [
        START + timedelta(seconds=90),
        START + timedelta(minutes=3),
    ]


def test_a_cron_expression_is_read_in_its_time_zone() -> None:
    assert local("0 6 * * *", datetime(2030, 3, 29, 12, tzinfo=UTC), 3) == [
        "03-30 06:00+0100",
        "03-31 06:00+0200",
        "04-01 06:00+0200",
    ]
    assert local("@daily", START, 1, "UTC") == ["01-02 00:00+0000"]
    assert local("0 9 * * mon-fri", datetime(2030, 1, 4, 12, tzinfo=UTC), 2) == ["01-07 09:00+0100", "01-08 09:00+0100"]


def test_a_time_that_the_clock_jumps_over_is_due_right_after_the_jump() -> None:
    before = datetime(2030, 3, 30, 12, tzinfo=UTC)  # on the 31st 02:00 becomes 03:00
    assert local("30 2 * * *", before, 2) == ["03-31 03:00+0200", "04-01 02:30+0200"]
    assert local("*/30 * * * *", datetime(2030, 3, 31, 0, 30, tzinfo=UTC), 2) == [
        "03-31 03:00+0200",
        "03-31 03:30+0200",
    ]


def test_a_time_that_comes_twice_is_due_once_unless_every_hour_is() -> None:
    before = datetime(2030, 10, 26, 12, tzinfo=UTC)  # on the 27th 03:00 becomes 02:00
    assert local("30 2 * * *", before, 2) == ["10-27 02:30+0200", "10-28 02:30+0100"]
    at = datetime(2030, 10, 27, 0, 0, tzinfo=UTC)
    assert local("0 * * * *", at, 3) == ["10-27 02:00+0100", "10-27 03:00+0100", "10-27 04:00+0100"]


@pytest.mark.parametrize("cron", ["30 2 * * *", "*/7 * * * *", "0 */3 * * *", "15 1-3 * * sun", "0 0 29 2 *"])
@pytest.mark.parametrize("tz", ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"])
@settings(max_examples=15, deadline=None)
@given(hours=st.integers(0, 24 * 400), minutes=st.integers(0, 59))
def test_times_only_go_forward_and_do_not_depend_on_where_one_starts(
    cron: str, tz: str, hours: int, minutes: int
) -> None:
    timing = Timing(cron=cron, tz=tz)
    after = START + timedelta(hours=hours, minutes=minutes)
    times = preview(timing, after, 4)
    assert times == sorted(set(times))
    assert times[0] > after
    assert [timing.after(at) for at in times[:-1]] == times[1:]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, None, "UTC"), "needs every or cron"),
        (("5m", "* * * * *", "UTC"), "needs every or cron"),
        (("0.5s", None, "UTC"), "shortest interval"),
        ((None, "* * * *", "UTC"), "not a cron expression"),
        ((None, "61 * * * *", "UTC"), "Bad minute"),
        ((None, "", "UTC"), "not a cron expression"),
        ((None, "0 0 31 2 *", "UTC"), "Bad day-of-month"),
        ((None, "0 0 29 2 *", "Mars/Olympus"), "no time zone"),
        ((None, "* * * * *", "../etc/passwd"), "no time zone"),
        (("5m", None, ""), "no time zone"),
    ],
)
def test_what_is_never_due_is_refused(given: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        Timing.of(*given)


@pytest.mark.parametrize("timing", [Timing.of("60s", None, "UTC"), Timing.of(None, "* * * * *", "Europe/Berlin")])
def test_of_missed_ticks_the_newest_is_left_or_all_are_caught_up(timing: Timing) -> None:
    now = START + timedelta(minutes=5, seconds=30)
    last, following = START + timedelta(minutes=5), START + timedelta(minutes=6)
    assert timing.due(START, now, "skip") == ([last], following)
    every_minute = [START + timedelta(minutes=n) for n in range(6)]
    assert timing.due(START, now, "catch_up") == (every_minute, following)
    assert timing.due(START, START, "skip") == ([START], START + timedelta(minutes=1))
    assert timing.due(START, START, "catch_up") == ([START], START + timedelta(minutes=1))


@pytest.mark.parametrize("timing", [Timing.of("1s", None, "UTC"), Timing.of(None, "* * * * * *", "UTC")])
def test_a_year_of_missed_seconds_is_skipped_at_once_and_caught_up_in_parts(timing: Timing) -> None:
    now = START + timedelta(days=365, microseconds=5)
    assert timing.due(START, now, "skip") == ([START + timedelta(days=365)], START + timedelta(days=365, seconds=1))
    times, following = timing.due(START, now, "catch_up")
    assert times == [START + timedelta(seconds=n) for n in range(AT_ONCE)]
    assert following == START + timedelta(seconds=AT_ONCE)


@settings(max_examples=30, deadline=None)
@given(
    cron=st.sampled_from(["30 2 * * *", "*/7 * * * *", "0 0 1 1 *", "0 0 29 2 *"]),
    days=st.integers(0, 4000),
    minutes=st.integers(0, 1440),
)
def test_the_newest_of_a_long_time_is_the_last_of_all(cron: str, days: int, minutes: int) -> None:
    timing = Timing(cron=cron, tz="Europe/Berlin")
    first = timing.after(START)
    now = first + timedelta(days=days, minutes=minutes)
    (newest,), following = timing.due(first, now, "skip")
    assert first <= newest <= now < following
    assert timing.after(newest) == following


def test_times_in_headers_are_in_utc() -> None:
    assert utc_text(datetime(2030, 1, 1, 1, tzinfo=BERLIN)) == "2030-01-01T00:00:00Z"
