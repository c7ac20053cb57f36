"""`custody maintain`, `custody journal`, and retention for `custody topics`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from custody.cli import render
from custody.cli.arguments import DURATION, SIZE
from custody.cli.session import Session, counted, session_of
from custody.cli.settings import RETENTION, options
from custody.model.entities import JournalPart, Segment, Upkeep
from custody.model.policy import seconds
from custody.model.retention import Retention, size_in_bytes

if TYPE_CHECKING:
    from custody import Custody

retention_options = options(Retention, names=RETENTION, none=False)


def retention_of(given: dict[str, Any]) -> Retention | None:
    """The retention given by the options; None if there is none."""
    if given and "time" not in given and "size" not in given:
        raise typer.BadParameter("a retention needs --retention-time or --retention-size")
    return Retention(**given) if given else None


def described(retention: Retention | None) -> str:
    """A retention in words."""
    if retention is None:
        return "everything is kept"
    kept = [] if retention.time is None else [render.span(seconds(retention.time))]
    kept += [] if retention.size is None else [_size(size_in_bytes(retention.size))]
    text = " and at most ".join(kept) if retention.time is not None else f"at most {kept[0]}"
    return text + (", unresolved messages too" if retention.drop_unresolved else "")


def _size(count: int) -> str:
    return render.size(count)


def show_segments(session: Session, segments: list[Segment]) -> None:
    rows = [
        [s.segment, "open" if s.sealed_at is None else "sealed", s.messages, _size(s.bytes), s.from_time, s.until_time]
        for s in segments
    ]
    session.table(["segment", "", "messages", "size", "from", "until"], rows, empty="")
    held = segments[0] if segments else None
    if held is not None and held.held_group is not None:
        where = f"partition {held.held_partition}, offset {held.held_offset}"
        print(f"segment {held.segment} is held by group {held.held_group}: {where} is not resolved")


def maintain(
    ctx: typer.Context,
    topic: Annotated[str | None, typer.Option("--topic", "-t", help="Only this topic (default: all).")] = None,
    every: Annotated[Any, typer.Option(help="Repeat at this interval (default: run once).", **DURATION)] = None,
) -> None:
    """Drop what the retention of topics and the journal allows. Workers, pipelines and servers also do this."""
    session = session_of(ctx)
    with session.connect() as c:
        while True:
            _round(session, c, topic, repeated=every is not None)
            if every is None:
                return
            time.sleep(seconds(every))


def _round(session: Session, c: Custody, topic: str | None, *, repeated: bool) -> None:
    done = c.maintain(topic)
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
    contents = _size(one.bytes) + ("" if one.messages is None else f", {counted(one.messages, 'message')}")
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


def journal(
    ctx: typer.Context,
    keep_time: Annotated[Any, typer.Option(help="Keep the journal for this long, such as 30d.", **DURATION)] = None,
    keep_size: Annotated[Any, typer.Option(help="Keep at most this much of it, such as 5GB.", **SIZE)] = None,
    keep_all: Annotated[bool, typer.Option("--keep-all", help="Keep all of it from now on.")] = False,
) -> None:
    """Show the journal (the history of all messages), its size, parts and retention, or set its retention."""
    session = session_of(ctx)
    if keep_all and (keep_time is not None or keep_size is not None):
        raise typer.BadParameter("--keep-all cannot be combined with --keep-time and --keep-size")
    with session.connect() as c:
        if keep_all or keep_time is not None or keep_size is not None:
            c.set_journal_retention(time=keep_time, size=keep_size)
        found = c.journal()
    if session.json:
        session.emit(found)
        return
    retention = None if found.keep_time is None and found.keep_size is None else (found.keep_time, found.keep_size)
    kept = "everything is kept" if retention is None else described(Retention(time=retention[0], size=retention[1]))
    session.facts(
        {"kept": kept, "size": _size(sum(p.bytes for p in found.parts)), "dropped until": found.dropped_until}
    )
    session.table(["part", "", "size", "since", "until"], [_part_row(part) for part in found.parts], empty="")


def _part_row(part: JournalPart) -> list[object]:
    return [
        part.part,
        "open" if part.sealed_at is None else "sealed",
        _size(part.bytes),
        part.created_at,
        part.sealed_at,
    ]
