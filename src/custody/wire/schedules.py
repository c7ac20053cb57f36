"""The JSON of schedules."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from msgspec import Struct

from custody.model.schedule import Missed, Schedule, State


class ScheduleOut(Struct, kw_only=True):
    """A schedule; `every` is in seconds. `state` says what is wrong, if anything is."""

    name: str
    topic: str
    every: float | None
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

    def value(self) -> Schedule:
        given = {one.name: getattr(self, one.name) for one in fields(Schedule)}
        return Schedule(**{**given, "every": None if self.every is None else timedelta(seconds=self.every)})
