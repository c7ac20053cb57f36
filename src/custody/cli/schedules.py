"""`custody schedules`: list, describe, create, edit, pause, resume, run, delete."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from msgspec import UNSET

from custody.cli import arguments, render
from custody.cli.arguments import DURATION, Ensure, Reason, Yes
from custody.cli.session import Session, session_of, single
from custody.model.schedule import Schedule

app = typer.Typer(no_args_is_help=True, help="Schedules: list, describe, create, edit, pause, resume, run, delete.")

Name = Annotated[str, typer.Argument(metavar="SCHEDULE", help="The name of the schedule.")]
Every = Annotated[Any, typer.Option(help="Interval, at least a second, such as 5m.", **DURATION)]
Cron = Annotated[
    str | None, typer.Option(metavar="EXPRESSION", help="Minute, hour, day, month and weekday, or @daily and the like.")
]
Zone = Annotated[str | None, typer.Option(metavar="ZONE", help="Time zone of the cron expression (default: UTC).")]
Missed = Annotated[
    str | None, typer.Option(metavar="skip|catch_up", help="What becomes of ticks that were missed (default: skip).")
]
Payload = Annotated[str | None, typer.Option(help="What it publishes: JSON, or text with --text (default: null).")]
AsText = Annotated[bool, typer.Option("--text", help="The payload is text.")]
Key = Annotated[str | None, typer.Option("--key", "-k", help="The key of its messages.")]
Header = Annotated[
    list[Any] | None,
    typer.Option(parser=arguments.header, metavar="NAME=VALUE", help="A header of its messages; may be repeated."),
]


@app.command("list")
def list_schedules(ctx: typer.Context) -> None:
    """List the schedules: when each is due next, and what is wrong with it."""
    session = session_of(ctx)
    with session.connect() as c:
        found = c.schedules()
    if session.json:
        session.emit(found)
        return
    rows = [[s.name, _times(s), s.topic, s.app, s.state, s.next_at, s.last_at] for s in found]
    session.table(["schedule", "times", "topic", "app", "state", "next", "last"], rows, empty="There are no schedules.")
    for one in found:
        if (trouble := _trouble(one)) is not None:
            session.note(f"{one.name}: {trouble}")


@app.command()
def describe(ctx: typer.Context, name: Name) -> None:
    """Show one schedule with all its settings."""
    session = session_of(ctx)
    with session.connect() as c:
        _show(session, c.schedule(name))


@app.command()
def create(
    ctx: typer.Context,
    name: Name,
    topic: Annotated[str, typer.Option("--topic", "-t", help="The topic that it publishes to.")],
    every: Every = None,
    cron: Cron = None,
    tz: Zone = None,
    missed: Missed = None,
    payload: Payload = None,
    text: AsText = False,
    key: Key = None,
    header: Header = None,
    ensure: Ensure = False,
) -> None:
    """Create a schedule, which publishes a message at its times."""
    session = session_of(ctx)
    single(every=every, cron=cron)
    with session.connect() as c:
        make = c.ensure_schedule if ensure else c.create_schedule
        made = make(
            name,
            topic=topic,
            every=every,
            cron=cron,
            tz=tz or "UTC",
            missed=missed or "skip",  # type: ignore[arg-type]  # the verb refuses another one
            payload=_payload(payload, text=text),
            key=key,
            headers=dict(header) if header else None,
        )
    if session.json:
        session.emit(made)
    session.say(f"schedule {name}: {_times(made)}, next {render.moment(made.next_at)}")


@app.command()
def edit(
    ctx: typer.Context,
    name: Name,
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="The topic that it publishes to.")] = None,
    every: Every = None,
    cron: Cron = None,
    tz: Zone = None,
    missed: Missed = None,
    payload: Payload = None,
    text: AsText = False,
    key: Key = None,
    header: Header = None,
) -> None:
    """Change settings of a schedule. An app keeps them until its code declares others."""
    session = session_of(ctx)
    single(every=every, cron=cron)
    given = {"topic": topic, "every": every, "cron": cron, "tz": tz, "missed": missed, "key": key}
    changes: dict[str, Any] = {setting: value for setting, value in given.items() if value is not None}
    if payload is not None:
        changes["payload"] = _payload(payload, text=text)
    if header:
        changes["headers"] = dict(header)
    if not changes:
        raise typer.BadParameter("there is nothing to change: give a setting, such as --every 10m")
    with session.connect() as c:
        changed = c.change_schedule(name, **{"topic": UNSET, **changes})
    if session.json:
        session.emit(changed)
    session.say(f"schedule {name}: {_times(changed)}, next {render.moment(changed.next_at)}")


@app.command()
def pause(ctx: typer.Context, name: Name, reason: Reason = None) -> None:
    """Publish no more ticks of a schedule until it is resumed."""
    session = session_of(ctx)
    with session.connect() as c:
        changed = c.pause_schedule(name, reason=reason)
    _changed(session, name, changed, "paused", "it was paused already")


@app.command()
def resume(ctx: typer.Context, name: Name) -> None:
    """End a pause. What was due during it is not published."""
    session = session_of(ctx)
    with session.connect() as c:
        changed = c.resume_schedule(name)
    _changed(session, name, changed, "resumed", "it was not paused")


@app.command()
def run(ctx: typer.Context, name: Name) -> None:
    """Publish the message of a schedule now. Its times stay as they are."""
    session = session_of(ctx)
    with session.connect() as c:
        receipt = c.run_schedule(name)
    place = {"schedule": name, "topic": receipt.topic, "partition": receipt.partition, "offset": receipt.offset}
    session.show(place, f"published to {receipt.topic}/{receipt.partition}/{receipt.offset}")


@app.command()
def delete(ctx: typer.Context, name: Name, yes: Yes = False) -> None:
    """Delete a schedule. Its topic and the messages stay."""
    session = session_of(ctx)
    with session.connect() as c:
        found = c.schedule(name)
        made_again = f" The app {found.app} makes it again when it starts, if it has code for it." if found.app else ""
        session.confirm(f"Delete schedule {name} ({_times(found)})?{made_again}", yes=yes)
        c.delete_schedule(name)
    if session.json:
        session.emit({"schedule": name, "deleted": True})
    session.say(f"deleted schedule {name}")


def _payload(given: str | None, *, text: bool) -> Any:
    if given is None or text:
        return given
    try:
        return json.loads(given)
    except ValueError as error:
        raise typer.BadParameter(f"the payload is not JSON: {error}. For text add --text") from error


def _changed(session: Session, name: str, changed: bool, done: str, otherwise: str) -> None:
    if session.json:
        session.emit({"schedule": name, "changed": changed})
    session.say(f"schedule {name}: {done if changed else otherwise}")


def _times(schedule: Schedule) -> str:
    """When it is due."""
    if schedule.every is not None:
        return f"every {render.span(schedule.every)}"
    return f"{schedule.cron} {schedule.tz}"


def _trouble(schedule: Schedule) -> str | None:
    """What is wrong with a schedule, and what to do."""
    if schedule.state == "failing":
        return f"the last tick could not be published: {schedule.last_error}"
    if schedule.state == "late":
        return "a tick is due and nobody publishes it. Start a worker or a server."
    if schedule.state == "unattended":
        return (
            f"no process of the app {schedule.app} runs that has code for it, so its ticks wait. "
            f"Start one (custody work), or: custody schedules delete {schedule.name}"
        )
    return None


def _show(session: Session, schedule: Schedule) -> None:
    if session.json:
        session.emit(schedule)
        return
    paused = None
    if schedule.paused_at is not None:
        paused = f"since {render.moment(schedule.paused_at)}: {schedule.paused_reason or 'no reason given'}"
    session.facts(
        {
            "schedule": schedule.name,
            "times": _times(schedule) + (" (edited)" if schedule.edited else ""),
            "missed": schedule.missed,
            "topic": schedule.topic,
            "key": schedule.key,
            "payload": render.payload(schedule.payload),
            "headers": ", ".join(f"{name}={value}" for name, value in schedule.headers.items()) or None,
            "app": schedule.app,
            "state": schedule.state,
            "next": schedule.next_at,
            "last": schedule.last_at,
            "paused": paused,
            "created": schedule.created_at,
        }
    )
    if (trouble := _trouble(schedule)) is not None:
        session.note(trouble)
