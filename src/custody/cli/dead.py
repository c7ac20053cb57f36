"""`custody dead`, `redrive`, `discard` and `replay`: the dead letters of a group and what to do with them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any

import typer

from custody.cli import arguments, render
from custody.cli.arguments import DryRun, Group, Partition, Reason, Topic, Yes
from custody.cli.session import Session, counted, session_of

WhereError = Annotated[str | None, typer.Option(metavar="LIKE", help="Only errors like this: 'timeout%'.")]
Key = Annotated[str | None, typer.Option(help="Only messages of this key.")]
Offsets = Annotated[list[int] | None, typer.Option("--offset", help="Only this offset; may be repeated.")]
_TIME = typer.Option(parser=arguments.time, metavar="TIME", help="2030-01-31T12:00Z, or 15m: so long ago.")
DiedFrom = Annotated[datetime | None, _TIME]
DiedUntil = Annotated[datetime | None, _TIME]
Limit = Annotated[int | None, typer.Option(min=1, help="No more than this many.")]


def dead(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    limit: Annotated[int, typer.Option(min=1, help="No more than this many.")] = 1000,
    payload: Annotated[bool, typer.Option("--payload", help="Show the payloads too.")] = False,
) -> None:
    """The dead letters of a group, with their errors."""
    session = session_of(ctx)
    with session.connect() as c:
        letters = c.dead(topic, group, limit=limit)
    if session.json:
        session.emit(letters)
        return
    columns = ["message", "key", "attempts", "died", "held", "reason", "last error", *(["payload"] if payload else [])]
    rows: list[list[object]] = [
        [
            f"{letter.partition}/{letter.offset}",
            letter.key,
            letter.attempts,
            letter.died_at,
            letter.held,
            letter.reason,
            letter.last_error,
            *([render.payload(letter.payload)] if payload else []),
        ]
        for letter in letters
    ]
    session.table(columns, rows, empty=f"Group {group} of topic {topic} has no dead letters.")
    if len(letters) == limit:
        session.note(f"the first {limit:,}; there may be more (--limit)")


def redrive(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    where_error: WhereError = None,
    key: Key = None,
    partition: Partition = None,
    offset: Offsets = None,
    died_from: DiedFrom = None,
    died_until: DiedUntil = None,
    limit: Limit = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Make dead messages ready again, with a fresh budget: all, or those that the filters pick."""
    session = session_of(ctx)
    with session.connect() as c:
        _on_dead(session, c.redrive, "redrive", topic, group, _which(ctx), reason=reason, dry_run=dry_run, yes=yes)


def discard(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    where_error: WhereError = None,
    key: Key = None,
    partition: Partition = None,
    offset: Offsets = None,
    died_from: DiedFrom = None,
    died_until: DiedUntil = None,
    limit: Limit = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Give dead messages up for good: all, or those that the filters pick."""
    session = session_of(ctx)
    with session.connect() as c:
        _on_dead(session, c.discard, "discard", topic, group, _which(ctx), reason=reason, dry_run=dry_run, yes=yes)


def replay(
    ctx: typer.Context,
    dlq_topic: Annotated[str, typer.Argument(help="The dead-letter topic: orders-dlq.")],
    partition: Annotated[int, typer.Argument(help="The partition of the copy.")],
    offset: Annotated[int, typer.Argument(help="The offset of the copy.")],
    to: Annotated[str | None, typer.Option(metavar="TOPIC", help="Another topic than it came from.")] = None,
    reason: Reason = None,
) -> None:
    """Publish a copy from a dead-letter topic again, once; the dead message counts as done."""
    session = session_of(ctx)
    with session.connect() as c:
        replayed = c.replay(dlq_topic, partition, offset, target_topic=to, reason=reason)
    if session.json:
        session.emit(replayed)
        return
    where = f"{replayed.topic}/{replayed.partition}/{replayed.offset}"
    said = "was replayed before, as" if replayed.duplicate else "replayed as"
    session.say(f"{dlq_topic}/{partition}/{offset} {said} {where}")
    if not replayed.resolved:
        session.note("its message was not dead any more: somebody has redriven or discarded it")


def _which(ctx: typer.Context) -> dict[str, Any]:
    """What the filters of a command pick, as the verbs take it."""
    names = ("where_error", "key", "partition", "died_from", "died_until", "limit")
    return {name: ctx.params[name] for name in names} | {"offsets": list(ctx.params["offset"] or ()) or None}


def _on_dead(
    session: Session,
    act: Callable[..., list[tuple[int, int]]],
    verb: str,
    topic: str,
    group: str,
    which: dict[str, Any],
    *,
    reason: str | None,
    dry_run: bool,
    yes: bool,
) -> None:
    """Looks first, asks if there is anything to ask about, then acts."""
    chosen = act(topic, group, dry_run=True, **which)
    if chosen and not dry_run:
        session.confirm(f"{verb.title()} {counted(len(chosen), 'dead message')} of {topic}/{group}?", yes=yes)
        chosen = act(topic, group, reason=reason, **which)
    if session.json:
        messages = [{"partition": partition, "offset": offset} for partition, offset in chosen]
        session.emit({"topic": topic, "group": group, "dry_run": dry_run, "count": len(chosen), "messages": messages})
        return
    if dry_run:
        session.table(["partition", "offset"], chosen, empty="")
    past = {"redrive": "redriven", "discard": "discarded"}[verb]
    session.say(f"{counted(len(chosen), 'dead message')} {'would be ' if dry_run else ''}{past}")
