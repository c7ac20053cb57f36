"""A clock that stands still until a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from custody.model.policy import Duration, seconds

START = datetime(2030, 1, 1, tzinfo=UTC)


class Clock:
    """Custody's clock for due times, deadlines and all recorded times."""

    def __init__(self, start: datetime = START) -> None:
        if start.tzinfo is None:
            raise ValueError("the clock needs a time with a time zone, such as datetime(2030, 1, 1, tzinfo=UTC)")
        self.time = start

    def __call__(self) -> datetime:
        return self.time

    def move(self, by: Duration) -> datetime:
        """Moves the time forward, by `"5s"`, a number of seconds or a timedelta. Returns the new time."""
        self.time += timedelta(seconds=seconds(by))
        return self.time

    def __repr__(self) -> str:
        return f"<Clock at {self.time.isoformat()}>"
