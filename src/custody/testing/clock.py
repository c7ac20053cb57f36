"""A clock that stands still until a test moves it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from custody.errors import InvalidArgument
from custody.model.policy import Duration, seconds

START = datetime(2030, 1, 1, tzinfo=UTC)


class Clock:
    """Custody's clock for due times, deadlines and all recorded times."""

    def __init__(self, start: datetime = START) -> None:
        self.set(start)

    def __call__(self) -> datetime:
        return self.time

    def move(self, by: Duration) -> datetime:
        """Moves the time forward, by `"5s"`, a number of seconds or a timedelta. Returns the new time."""
        self.time += timedelta(seconds=seconds(by))
        return self.time

    def set(self, time: datetime | str) -> datetime:
        """Sets the time, also to an earlier one: a datetime with a zone, or `"2030-01-31T12:00Z"`. Returns it."""
        try:
            given = datetime.fromisoformat(time) if isinstance(time, str) else time
        except ValueError as error:
            raise InvalidArgument(f"{time!r} is not a time", 'Write "2030-01-31T12:00Z".') from error
        if given.tzinfo is None:
            raise InvalidArgument(
                f"the clock needs a time with a time zone, not {given.isoformat()}", 'Write "2030-01-31T12:00Z".'
            )
        self.time = given
        return given

    def __repr__(self) -> str:
        return f"<Clock at {self.time.isoformat()}>"
