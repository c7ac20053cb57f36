"""Schedules: messages that are published at their times, each once however many processes run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from datetime import datetime
from typing import Annotated, Any

from msgspec import UNSET, UnsetType, json

from custody.engine.groups import Groups
from custody.errors import (
    CustodyError,
    InvalidArgument,
    InvalidPayload,
    QueueFull,
    ScheduleExists,
    ScheduleNotFound,
    TopicChanged,
    Transient,
)
from custody.model import codec
from custody.model.entities import Payload, Receipt
from custody.model.policy import Duration, interval, seconds
from custody.model.schedule import RUN_BY, SCHEDULE, SCHEDULED_AT, SUPERSEDED_AT, Missed, Schedule, Timing, utc_text
from custody.verbs.ticking import Ticker
from custody.wire.answers import ChangedOut
from custody.wire.fields import GivenTimeout, Help, Name, NewName, Reason, Sent, Text
from custody.wire.messages import PlacedOut
from custody.wire.schedules import ScheduleOut
from custody.wire.verb import composed, verb

SCHEDULES = "/schedules"
SCHEDULE_PATH = SCHEDULES + "/{name}"
ATTENDED = 120.0
"""Seconds for which an app that attends its schedules need not do it again."""


def plain_payload(payload: Payload) -> Payload:
    """The payload of a schedule as a JSON value or text."""
    kind, data = codec.encode(payload)
    if kind == b"b":
        raise InvalidPayload("the payload of a schedule cannot be bytes", "Give a JSON value or text.")
    return codec.decode(kind.decode(), data)


def checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a schedule, which are all strings."""
    codec.encode_headers(headers)
    return dict(headers)


GivenHeaders = Annotated[Mapping[str, str], Sent(dict[Text, Text], checked_headers)]
GivenPayload = Annotated[Any, Sent(Any, plain_payload)]
Destination = Annotated[Name, Help("The topic that it publishes to.")]
Every = Annotated[GivenTimeout, Help("Interval, at least a second, such as 5m.")]
Cron = Annotated[Text | None, Help("Minute, hour, day, month, weekday; or @daily and the like.", "EXPRESSION")]
Zone = Annotated[Name, Help("The time zone of the cron expression, such as Europe/Berlin.", "ZONE")]
MissedTicks = Annotated[Missed, Help("What becomes of ticks that were missed.")]
Key = Annotated[Text, Help("The key of its messages.")]


class Schedules(Groups):
    """Schedules and their ticks."""

    _ticker: Ticker | None = None

    @verb("GET", SCHEDULES, tag="schedules", right="consume", everywhere=True, answer=list[ScheduleOut])
    def schedules(self) -> list[Schedule]:
        """All schedules: when each is due next, and what is wrong with it."""
        return [_schedule(row) for row in self._rows("describe_schedules")]

    @verb("GET", SCHEDULE_PATH, tag="schedules", right="consume", everywhere=True, answer=ScheduleOut)
    def schedule(self, name: str) -> Schedule:
        """One schedule with all its settings."""
        return _schedule(self._rows("describe_schedules", name=name)[0])

    @verb(
        "POST",
        SCHEDULES,
        tag="schedules",
        right="admin",
        everywhere=True,
        answer=ScheduleOut,
        status=201,
        example={"name": "report", "topic": "jobs", "cron": "0 6 * * mon-fri", "tz": "Europe/Berlin"},
    )
    def create_schedule(
        self,
        name: NewName,
        *,
        topic: Destination,
        every: Every | None = None,
        cron: Cron = None,
        tz: Zone = "UTC",
        missed: MissedTicks = "skip",
        payload: GivenPayload = None,
        key: Key | None = None,
        headers: GivenHeaders | None = None,
        app: Name | None = None,
    ) -> Schedule:
        """Creates a schedule, which publishes a message at its times.

        With `every` the first one is due after one interval. Of ticks that were missed, while no worker and no server
        ran, `skip` publishes only the newest, and `catch_up` all of them.
        """
        settings = _settings(topic, every, cron, tz, missed, payload, key, headers)
        self._rows(
            "create_schedule",
            name=name,
            **_columns(settings),
            declared=_json(settings),
            app=app,
            next_at=_timing(settings).after(self._value("time")),
        )
        return self.schedule(name)

    @verb(
        "PATCH",
        SCHEDULE_PATH,
        tag="schedules",
        right="admin",
        everywhere=True,
        answer=ScheduleOut,
        repeat=True,
        example={"every": "10m"},
    )
    def change_schedule(
        self,
        name: str,
        *,
        topic: Destination | UnsetType = UNSET,
        every: Every | UnsetType | None = UNSET,
        cron: Cron | UnsetType = UNSET,
        tz: Zone | UnsetType = UNSET,
        missed: MissedTicks | UnsetType = UNSET,
        payload: GivenPayload | UnsetType = UNSET,
        key: Key | UnsetType | None = UNSET,
        headers: GivenHeaders | UnsetType | None = UNSET,
        app: Name | None = None,
        declare: Annotated[bool, Help("A program declares it; otherwise an operator edits it.")] = False,
    ) -> Schedule:
        """Changes the given settings. `every` replaces cron, and cron replaces `every`.

        If its times change, the next tick is due at the first of the new times after now. Then those that were missed
        are not published.
        """
        given = {"topic": topic, "every": every, "cron": cron, "tz": tz, "missed": missed, "payload": payload,
                 "key": key, "headers": headers}  # fmt: skip
        given = {setting: value for setting, value in given.items() if value is not UNSET}
        if given.get("every") is not None:
            given.setdefault("cron", None)
        if given.get("cron") is not None:
            given.setdefault("every", None)

        def change(row: dict[str, Any]) -> bool:
            before = _given(row)
            settings = _settings(**{**before, **given})
            timing = _timing(settings)
            return bool(
                self._value(
                    "change_schedule",
                    name=name,
                    revision=row["revision"],
                    **_columns(settings),
                    declared=_json(settings) if declare else None,
                    app=app,
                    next_at=row["next_at"] if timing == _timing(before) else timing.after(row["now"]),
                )
            )

        return self._until_done(name, change)

    @composed
    def ensure_schedule(
        self,
        name: str,
        *,
        topic: str,
        every: Duration | None = None,
        cron: str | None = None,
        tz: str = "UTC",
        missed: Missed = "skip",
        payload: Payload = None,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        app: str | None = None,
    ) -> Schedule:
        """Creates a schedule, or changes it if a program declares something else than the last time.

        So what an operator has edited since stays, until the code changes.
        """
        settings = _settings(topic, every, cron, tz, missed, payload, key, headers)
        try:
            found = self.schedule(name)
        except ScheduleNotFound:
            try:
                return self.create_schedule(name, **settings, app=app)
            except ScheduleExists:  # another process was faster
                found = self.schedule(name)
        if found.declared == _document(settings) and app in (None, found.app):
            return found
        if found.declared == _document(settings):
            return self.change_schedule(name, app=app)
        return self.change_schedule(name, **settings, app=app, declare=True)

    @verb(
        "POST",
        SCHEDULE_PATH + "/pause",
        tag="schedules",
        right="admin",
        everywhere=True,
        answer=ChangedOut,
        example={"reason": "maintenance"},
    )
    def pause_schedule(self, name: str, *, reason: Reason = None) -> bool:
        """Publishes no more ticks of a schedule until it is resumed.

        False if it was already paused.
        """
        return bool(self._value("pause_schedule", name=name, reason=reason))

    @verb("POST", SCHEDULE_PATH + "/resume", tag="schedules", right="admin", everywhere=True, answer=ChangedOut)
    def resume_schedule(self, name: str) -> bool:
        """Ends the pause of a schedule. What was due during it is not published.

        False if it was not paused.
        """
        changed = True

        def resume(row: dict[str, Any]) -> bool:
            nonlocal changed
            changed = row["paused_at"] is not None
            if not changed:
                return True
            next_at = _timing(_given(row)).after(row["now"])
            return bool(self._value("resume_schedule", name=name, revision=row["revision"], next_at=next_at))

        self._until_done(name, resume)
        return changed

    @verb(
        "POST",
        SCHEDULE_PATH + "/run",
        tag="schedules",
        right="admin",
        everywhere=True,
        answer=PlacedOut,
    )
    def run_schedule(self, name: str) -> Receipt:
        """Publishes the message of a schedule now, also while it is paused. Its times stay as they are."""
        row = self._rows("describe_schedules", name=name)[0]
        headers = {SCHEDULE: name, SCHEDULED_AT: utc_text(row["now"]), RUN_BY: self.worker}
        placed = self._rows("run_schedule", name=name, headers=_json(headers))[0]
        self._hints.send(row["topic"])
        return Receipt(row["topic"], placed["partition"], placed["offset"])

    @verb("DELETE", SCHEDULE_PATH, tag="schedules", right="admin", everywhere=True, answer=None)
    def delete_schedule(self, name: str) -> None:
        """Deletes a schedule. Its topic and the messages stay."""
        self._rows("delete_schedule", name=name)

    @verb(
        "POST",
        SCHEDULES + "/attend",
        tag="schedules",
        right="consume",
        everywhere=True,
        answer=list[str],
        repeat=True,
        example={"app": "shop", "names": ["report"]},
    )
    def attend_schedules(self, app: Name, names: list[Name]) -> list[str]:
        """Records that a process of the app runs, with code for these schedules. It is valid for two minutes.

        Returns the schedules of the app that are not named: nobody handles their ticks.
        """
        rows = self._db.call("attend_schedules", app=app, names=names, timeout=interval(ATTENDED))
        return [name for (name,) in rows]

    def tick(self) -> float | None:
        """Publishes the ticks that are due. Workers and servers do this all the time (`ticking`).

        Returns the seconds until the next one, or None if there is none; at most 0 if others are at it.
        """
        while True:
            due: float | None = self._value("next_tick")
            if due is None or due > 0:
                return due
            published = [self._tick(row) for row in self._rows("due_schedules")]
            if not any(published):
                return due

    def ticking(self) -> AbstractContextManager[None]:
        """Publishes ticks, from one thread of this client, for as long as a block of it runs."""
        if self._ticker is None:
            self._ticker = Ticker(self.tick)
        return self._ticker.running()

    def _tick(self, row: Mapping[str, Any]) -> bool:
        """Publishes what is due of one schedule, or records why it cannot. False if others are at it."""
        name, revision = row["name"], row["revision"]
        try:
            timing = Timing(every=row["every"], cron=row["cron"], tz=row["tz"])
            times, next_at = timing.due(row["next_at"], row["now"], row["missed"])
            placed = self._rows(
                "publish_ticks",
                name=name,
                revision=revision,
                times=times,
                headers=[_json(_headers(name, at, next_at, row["missed"])) for at in times],
                next_at=next_at,
            )
        except TopicChanged:  # it has grown at this moment
            return False
        except CustodyError as error:
            if isinstance(error, Transient) and not isinstance(error, QueueFull):
                raise
            self._rows("fail_tick", name=name, revision=revision, error=str(error))
            return True
        if placed:
            self._hints.send(row["topic"])
        return bool(placed)

    def _until_done(self, name: str, change: Callable[[dict[str, Any]], bool]) -> Schedule:
        """Repeats a change until nobody else has changed the schedule between its reading and its writing."""
        while not change(self._rows("describe_schedules", name=name)[0]):
            pass
        return self.schedule(name)


def _headers(name: str, at: datetime, next_at: datetime, missed: Missed) -> dict[str, str]:
    found = {SCHEDULE: name, SCHEDULED_AT: utc_text(at)}
    return {**found, SUPERSEDED_AT: utc_text(next_at)} if missed == "skip" else found


def _settings(
    topic: str,
    every: Duration | None,
    cron: str | None,
    tz: str,
    missed: Missed,
    payload: Payload,
    key: str | None,
    headers: Mapping[str, str] | None,
) -> dict[str, Any]:
    """All settings of a schedule, checked."""
    Timing.of(every, cron, tz)
    if missed not in ("skip", "catch_up"):
        raise InvalidArgument(f"missed cannot be {missed!r}", "It is skip or catch_up.")
    codec.require_key(key)
    return {
        "topic": topic,
        "every": None if every is None else seconds(every),
        "cron": cron,
        "tz": tz,
        "missed": missed,
        "payload": plain_payload(payload),
        "key": key,
        "headers": checked_headers(headers) if headers else None,
    }


def _columns(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as arguments of an SQL function."""
    kind, payload = codec.encode(settings["payload"])
    headers = codec.encode_headers(settings["headers"])
    return {
        **settings,
        "every": interval(settings["every"]),
        "kind": kind.decode(),
        "payload": payload,
        "headers": None if headers is None else headers.decode(),
    }


def _given(row: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a schedule that was read."""
    return {
        "topic": row["topic"],
        "every": None if row["every"] is None else row["every"].total_seconds(),
        "cron": row["cron"],
        "tz": row["tz"],
        "missed": row["missed"],
        "payload": codec.decode(row["kind"], row["payload"]),
        "key": row["key"],
        "headers": row["headers"],
    }


def _timing(settings: Mapping[str, Any]) -> Timing:
    return Timing(every=interval(settings["every"]), cron=settings["cron"], tz=settings["tz"])


def _json(value: Mapping[str, Any]) -> str:
    return json.encode(value).decode()


def _document(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as they come back from JSON."""
    found: dict[str, Any] = json.decode(json.encode(settings))
    return found


def _schedule(row: Mapping[str, Any]) -> Schedule:
    given = _given(row)
    known = {one.name: row[one.name] for one in fields(Schedule) if one.name in row}
    known |= {"payload": given["payload"], "headers": row["headers"] or {}}
    return Schedule(**known, edited=row["declared"] != _document(given))
