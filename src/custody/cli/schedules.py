"""`custody schedules`: list, describe, create, edit, pause, resume, run, delete."""

from __future__ import annotations

from typing import Any

import typer

from custody.cli import render
from custody.cli.arguments import Ensure
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import Session, single
from custody.engine import Custody
from custody.model.entities import Receipt
from custody.model.schedule import Schedule

app = typer.Typer(no_args_is_help=True, help="Schedules: list, describe, create, edit, pause, resume, run, delete.")

NAMED = {"name": "schedule"}


@app.command("list")
@calls(Custody.schedules)
def list_schedules(call: Call[list[Schedule]]) -> None:
    found = call()
    call.listing(
        found,
        [
            ("schedule", "name"),
            ("times", times),
            "topic",
            "app",
            ("state", lambda one: render.Trouble(one.state) if trouble(one) else one.state),
            ("next", "next_at"),
            ("last", "last_at"),
        ],
        empty="There are no schedules.",
    )
    for one in [] if call.session.json else found:
        if (wrong := trouble(one)) is not None:
            call.session.note(f"{one.name}: {wrong}")


@app.command()
@calls(Custody.schedule, names=NAMED)
def describe(call: Call[Schedule]) -> None:
    _show(call.session, call())


@app.command()
@calls(Custody.create_schedule, names=NAMED, without=["app"])
def create(call: Call[Schedule], name: str, every: Any, cron: str | None, ensure: Ensure = False) -> None:
    single(every=every, cron=cron)
    _changed(call.session, name, call.of("ensure_schedule")() if ensure else call())


@app.command()
@calls(Custody.change_schedule, names=NAMED, without=["app", "declare"])
def edit(call: Call[Schedule], name: str, every: Any, cron: str | None) -> None:
    """Change settings of a schedule. An app keeps them until its code declares others."""
    single(every=every, cron=cron)
    if call.given.keys() == {"name"}:
        raise typer.BadParameter("there is nothing to change: give a setting, such as --every 10m")
    _changed(call.session, name, call())


def _changed(session: Session, name: str, schedule: Schedule) -> None:
    if session.json:
        session.emit(schedule)
    session.say(f"schedule {name}: {times(schedule)}, next {render.moment(schedule.next_at)}")


@app.command()
@calls(Custody.pause_schedule, names=NAMED)
def pause(call: Call[bool], name: str) -> None:
    changed = call()
    call.report(f"schedule {name}: {'paused' if changed else 'it was paused already'}", changed=changed)


@app.command()
@calls(Custody.resume_schedule, names=NAMED)
def resume(call: Call[bool], name: str) -> None:
    changed = call()
    call.report(f"schedule {name}: {'resumed' if changed else 'it was not paused'}", changed=changed)


@app.command()
@calls(Custody.run_schedule, names=NAMED)
def run(call: Call[Receipt]) -> None:
    receipt = call()
    place = {"topic": receipt.topic, "partition": receipt.partition, "offset": receipt.offset}
    call.report(f"published to {receipt.topic}/{receipt.partition}/{receipt.offset}", **place)


@app.command()
@calls(Custody.delete_schedule, names=NAMED, confirms=True)
def delete(call: Call[None], name: str) -> None:
    found = call.c.schedule(name)
    made_again = f" The app {found.app} makes it again when it starts, if it has code for it." if found.app else ""
    call.confirm(f"Delete schedule {name} ({times(found)})?{made_again}")
    call()
    call.report(f"deleted schedule {name}", deleted=True)


def times(schedule: Schedule) -> str:
    """When it is due."""
    if schedule.every is not None:
        return f"every {render.span(schedule.every)}"
    return f"{schedule.cron} {schedule.tz}"


def trouble(schedule: Schedule) -> str | None:
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
            "times": times(schedule) + (" (edited)" if schedule.edited else ""),
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
    if (wrong := trouble(schedule)) is not None:
        session.note(wrong)
