"""Schedules: when their ticks are due, by an interval or by a cron expression in a time zone. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from custody.errors import InvalidArgument
from custody.model.policy import Duration, seconds

Missed = Literal["skip", "catch_up"]
State = Literal["active", "paused", "failing", "late", "unattended"]

SCHEDULE = "x-custody-schedule"
"""The header of a tick with the name of its schedule."""
SCHEDULED_AT = "x-custody-scheduled-at"
"""The header with the time for which it was due, in UTC."""
SUPERSEDED_AT = "x-custody-superseded-at"
"""The header with the time of the next tick, if missed ticks are skipped: from then on this one is out of date."""
RUN_BY = "x-custody-run-by"
"""The header that a tick of `run_schedule` has: who asked for it."""

AT_ONCE = 100
"""Most ticks that are published in one transaction, when missed ones are caught up."""
SHORTEST = 1.0
_WINDOWS = [timedelta(hours=1), timedelta(days=1), timedelta(days=32), timedelta(days=366), timedelta(days=366 * 9)]
_SHORTCUTS = {"@hourly": "0 * * * *", "@daily": "0 0 * * *", "@midnight": "0 0 * * *", "@weekly": "0 0 * * 0",
              "@monthly": "0 0 1 * *", "@yearly": "0 0 1 1 *", "@annually": "0 0 1 1 *"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule, which publishes a message to its topic at its times.

    `state` is active, paused, failing (see `last_error`), late (a tick has been due for a minute: no worker and no
    server runs) or unattended (no process of its app runs that has code for it). `last_at` is the time for which the
    last tick was due. `declared` are the settings that a program gave last; `edited`: an operator has changed them
    since.
    """

    name: str
    topic: str
    every: timedelta | None
    cron: str | None
    tz: str
    missed: Missed
    key: str | None
    payload: Any
    headers: dict[str, str]
    app: str | None
    state: State
    edited: bool
    declared: dict[str, Any]
    next_at: datetime
    last_at: datetime | None
    attended_until: datetime | None
    paused_at: datetime | None
    paused_reason: str | None
    failed_at: datetime | None
    last_error: str | None
    created_at: datetime


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of a schedule: every so often, or by a cron expression in a time zone."""

    every: timedelta | None = None
    cron: str | None = None
    tz: str = "UTC"

    @classmethod
    def of(cls, every: Duration | None, cron: str | None, tz: str) -> Timing:
        """The timing of these settings, or InvalidArgument."""
        if (every is None) == (cron is None):
            raise InvalidArgument(
                "a schedule needs every or cron, and not both", 'For example every="5m", or cron="0 6 * * *".'
            )
        if every is not None and seconds(every) < SHORTEST:
            raise InvalidArgument(f"a schedule cannot tick every {every!r}", "The shortest interval is a second.")
        zone_of(tz)
        found = cls(every=None if every is None else timedelta(seconds=seconds(every)), cron=cron, tz=tz)
        found.after(datetime.now(UTC))  # refuses an expression that is wrong, or is never due
        return found

    def after(self, time: datetime) -> datetime:
        """The first time after this one. An interval counts from it."""
        return next(self.times(time))

    def times(self, after: datetime) -> Iterator[datetime]:
        """All times after this one, in UTC.

        Daylight saving is handled as by cron: a job at a time of day that the clock jumps over is due right after the
        jump, and one at a time that comes twice is due once. One with `*` as its hour follows the clock on the wall.
        """
        if self.every is not None:
            while True:
                after += self.every
                yield after
        assert self.cron is not None
        found = _parsed(self.cron, after.astimezone(zone_of(self.tz)))
        for one in found:
            at = one.astimezone(UTC)
            if at > after:
                yield at
                after = at
        raise InvalidArgument(f"the cron expression {self.cron!r} is never due", "Check its day and month.")

    def due(self, first: datetime, now: datetime, missed: Missed) -> tuple[list[datetime], datetime]:
        """The ticks to publish of those that are due from `first` on, and the time of the next one.

        Of ticks that were missed, `skip` leaves only the newest; `catch_up` all of them, at most AT_ONCE at a time.
        """
        if missed == "skip":
            newest = self._newest(first, now)
            return [newest], self.after(newest)
        ticks = [first]
        for at in self.times(first):
            if at > now or len(ticks) == AT_ONCE:
                return ticks, at
            ticks.append(at)
        raise AssertionError("times have no end")

    def _newest(self, first: datetime, now: datetime) -> datetime:
        """The newest time until now, counted from a time at which it is due."""
        if self.every is not None:
            return first + (now - first) // self.every * self.every
        for window in _WINDOWS:  # not every tick of a long time
            start = now - window
            if start <= first:
                break
            if (found := self.after(start)) <= now:
                first = found
                break
        for at in self.times(first):
            if at > now:
                break
            first = at
        return first


@lru_cache(maxsize=256)
def zone_of(name: str) -> ZoneInfo:
    """The time zone of this name."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidArgument(
            f"there is no time zone {name!r}", 'Name one such as "Europe/Berlin" or "UTC".'
        ) from error


def _parsed(cron: str, after: datetime) -> CronSim:
    try:
        return CronSim(_SHORTCUTS.get(cron.strip().lower(), cron), after)
    except CronSimError as error:
        raise InvalidArgument(
            f"{cron!r} is not a cron expression: {error}",
            'Write minute, hour, day, month and weekday, such as "0 6 * * mon-fri", or @hourly, @daily, @weekly.',
        ) from error


def utc_text(time: datetime) -> str:
    """A time as headers of ticks have it."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


def preview(timing: Timing, after: datetime, count: int) -> list[datetime]:
    """The next times after this one."""
    return list(islice(timing.times(after), count))
