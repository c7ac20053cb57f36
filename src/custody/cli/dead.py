"""`custody dead`, `redrive`, `discard` and `replay`: dead letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from custody.cli import render
from custody.cli.arguments import DryRun, Group, Limit, OptionalLimit, Partition, Reason, Time, Topic, Yes
from custody.cli.session import counted, session_of

WhereError = Annotated[str | None, typer.Option(metavar="LIKE", help="Only errors that match, such as 'timeout%'.")]
Key = Annotated[str | None, typer.Option(help="Only messages of this key.")]
Offsets = Annotated[list[int] | None, typer.Option("--offset", help="Only this offset; may be repeated.")]


def dead(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    limit: Limit = 1000,
    payload: Annotated[bool, typer.Option("--payload", help="Show the payloads too.")] = False,
) -> None:
    """List the dead letters of a group, with their errors."""
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


def _on_dead(verb: str, past: str, doc: str) -> Callable[..., None]:
    """A command that finds dead messages, asks for a confirmation if there are any, then calls the verb."""

    def command(
        ctx: typer.Context,
        topic: Topic,
        group: Group,
        where_error: WhereError = None,
        key: Key = None,
        partition: Partition = None,
        offset: Offsets = None,
        died_from: Time = None,
        died_until: Time = None,
        limit: OptionalLimit = None,
        reason: Reason = None,
        dry_run: DryRun = False,
        yes: Yes = False,
    ) -> None:
        session = session_of(ctx)
        filters = ("where_error", "key", "partition", "died_from", "died_until", "limit")
        which = {name: ctx.params[name] for name in filters} | {"offsets": list(offset or ()) or None}
        with session.connect() as c:
            act = getattr(c, verb)
            chosen = act(topic, group, dry_run=True, **which)
            if chosen and not dry_run:
                session.confirm(f"{verb.title()} {counted(len(chosen), 'dead message')} of {topic}/{group}?", yes=yes)
                chosen = act(topic, group, reason=reason, **which)
        if session.json:
            messages = [{"partition": partition, "offset": offset} for partition, offset in chosen]
            found = {"topic": topic, "group": group, "dry_run": dry_run, "count": len(chosen), "messages": messages}
            session.emit(found)
            return
        if dry_run:
            session.table(["partition", "offset"], chosen, empty="")
        session.say(f"{counted(len(chosen), 'dead message')} {'would be ' if dry_run else ''}{past}")

    command.__name__, command.__doc__ = verb, doc
    return command


redrive = _on_dead(
    "redrive", "redriven", "Make dead messages ready again, with attempts reset: all, or those that match the filters."
)
discard = _on_dead(
    "discard",
    "discarded",
    "Resolve dead messages without processing them: all, or those that match the filters. This cannot be undone.",
)


def replay(
    ctx: typer.Context,
    dlq_topic: Annotated[str, typer.Argument(help="The dead-letter topic, such as orders-dlq.")],
    partition: Annotated[int, typer.Argument(help="The partition of the copy.")],
    offset: Annotated[int, typer.Argument(help="The offset of the copy.")],
    to: Annotated[
        str | None, typer.Option(metavar="TOPIC", help="Publish to this topic instead of the original one.")
    ] = None,
    reason: Reason = None,
) -> None:
    """Publish the original of a dead-letter copy again and mark the dead message as done. Idempotent."""
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
        session.note("the message was no longer dead: it had been redriven or discarded")
