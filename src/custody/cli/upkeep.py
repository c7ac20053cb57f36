"""`custody maintain`, `custody journal`, and retention for `custody topics`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from custody.cli import render
from custody.cli.arguments import DURATION
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import Session, counted
from custody.engine import Custody
from custody.model.entities import Journal, Segment, Upkeep
from custody.model.policy import seconds
from custody.model.retention import Retention, size_in_bytes


def described(retention: Retention | None) -> str:
    """A retention in words."""
    if retention is None:
        return "everything is kept"
    kept = [] if retention.time is None else [render.span(seconds(retention.time))]
    kept += [] if retention.size is None else [render.size(size_in_bytes(retention.size))]
    text = " and at most ".join(kept) if retention.time is not None else f"at most {kept[0]}"
    return text + (", unresolved messages too" if retention.drop_unresolved else "")


def _size(count: int) -> str:
    return render.size(count)


def show_segments(session: Session, segments: list[Segment]) -> None:
    columns: list[render.Column] = [
        "segment",
        ("", lambda one: "open" if one.sealed_at is None else "sealed"),
        "messages",
        ("size", lambda one: render.size(one.bytes)),
        ("from", "from_time"),
        ("until", "until_time"),
    ]
    session.table(*render.columns(columns, segments), empty="")
    held = segments[0] if segments else None
    if held is not None and held.held_group is not None:
        where = f"partition {held.held_partition}, offset {held.held_offset}"
        print(f"segment {held.segment} is held by group {held.held_group}: {where} is not resolved")


@calls(Custody.maintain)
def maintain(
    call: Call[list[Upkeep]],
    every: Annotated[Any, typer.Option(help="Repeat at this interval (default: run once).", **DURATION)] = None,
) -> None:
    """Drop what the retention of topics and the journal allows. Workers, pipelines and servers also do this."""
    while True:
        _show(call.session, call(), repeated=every is not None)
        if every is None:
            return
        time.sleep(seconds(every))


def _show(session: Session, done: list[Upkeep], *, repeated: bool) -> None:
    if session.json:
        if done or not repeated:
            session.emit(done)
        return
    for one in done:
        print(sentence(one), flush=True)
    if not done and not repeated:
        session.say("There is nothing to do.")


def sentence(one: Upkeep) -> str:
    """One step of upkeep as text for people."""
    what = f"{one.topic}: segment {one.segment}" if one.topic is not None else f"journal: part {one.segment}"
    contents = render.size(one.bytes) + ("" if one.messages is None else f", {counted(one.messages, 'message')}")
    if one.did == "held":
        return (
            f"{what} ({contents}) is held by group {one.held_group}: "
            f"partition {one.held_partition}, offset {one.held_offset} is not resolved"
        )
    if one.did == "busy":
        return f"{what} is in use; the next run tries again"
    text = f"{what} {one.did} ({contents})"
    text += f", {counted(one.kept, 'dead letter')} copied" if one.kept else ""
    return text + (f", {counted(one.lost, 'unresolved message')} dropped" if one.lost else "")


@calls(Custody.set_journal_retention, names={"time": "keep_time", "size": "keep_size"})
def journal(
    call: Call[Journal],
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Keep all of it from now on.")] = False,
) -> None:
    """Show the journal (the history of all messages), its size, parts and retention, or set its retention."""
    session = call.session
    if keep_all and call.given:
        raise typer.BadParameter("--keep-all cannot be combined with --keep-time and --keep-size")
    found = call() if keep_all or call.given else call.c.journal()
    if session.json:
        session.emit(found)
        return
    retention = None if found.keep_time is None and found.keep_size is None else (found.keep_time, found.keep_size)
    kept = "everything is kept" if retention is None else described(Retention(time=retention[0], size=retention[1]))
    session.facts(
        {"kept": kept, "size": render.size(sum(p.bytes for p in found.parts)), "dropped until": found.dropped_until}
    )
    columns: list[render.Column] = [
        "part",
        ("", lambda part: "open" if part.sealed_at is None else "sealed"),
        ("size", lambda part: render.size(part.bytes)),
        ("since", "created_at"),
        ("until", "sealed_at"),
    ]
    session.table(*render.columns(columns, found.parts), empty="")
