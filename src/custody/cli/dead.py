"""`custody dead`, `redrive`, `discard` and `replay`: dead letters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Annotated, Any

import typer

from custody.cli import render
from custody.cli.arguments import DryRun, Group, Limit, OptionalLimit, Partition, Reason, Time, Topic, Yes
from custody.cli.session import Session, counted, session_of
from custody.model.entities import DeadLetter

WhereError = Annotated[str | None, typer.Option(metavar="LIKE", help="Only errors that match, such as 'timeout%'.")]
Key = Annotated[str | None, typer.Option(help="Only messages of this key.")]
Offsets = Annotated[list[int] | None, typer.Option("--offset", help="Only this offset; may be repeated.")]
SAMPLE = 10
"""Messages that a dry run shows in full."""


def dead(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    where_error: WhereError = None,
    key: Key = None,
    partition: Partition = None,
    offset: Offsets = None,
    died_from: Time = None,
    died_until: Time = None,
    limit: Limit = 1000,
    payload: Annotated[bool, typer.Option("--payload", help="Show the payloads too.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", "-t", help="Show the end of each traceback too.")] = False,
) -> None:
    """List the dead letters of a group, with their errors: all, or those that match the filters."""
    session = session_of(ctx)
    with session.connect() as c:
        letters = c.dead(topic, group, limit=limit, **_conditions(ctx))
    if session.json:
        session.emit(letters)
        return
    if traceback and letters:
        _print_with_tracebacks(session, letters, payload=payload)
    else:
        what = "no dead letters that match" if any(_conditions(ctx).values()) else "no dead letters"
        _print_letters(session, letters, payload=payload, empty=f"Group {group} of topic {topic} has {what}.")
    if len(letters) == limit:
        session.note(f"the first {limit:,}; there may be more (--limit)")


def _conditions(ctx: typer.Context) -> dict[str, Any]:
    """The filters that were given, as the verbs take them."""
    given = {name: ctx.params[name] for name in ("where_error", "key", "partition", "died_from", "died_until")}
    return given | {"offsets": list(ctx.params["offset"] or ()) or None}


def _print_letters(session: Session, letters: Sequence[DeadLetter], *, payload: bool, empty: str = "") -> None:
    places = [raised_at(letter.last_traceback) for letter in letters]
    more = [*(["raised at"] if any(places) else []), *(["payload"] if payload else [])]
    rows: list[list[object]] = [
        [
            f"{letter.partition}/{letter.offset}",
            letter.key,
            letter.attempts,
            letter.died_at,
            letter.held,
            letter.reason,
            letter.last_error,
            *([place] if any(places) else []),
            *([render.payload(letter.payload)] if payload else []),
        ]
        for letter, place in zip(letters, places, strict=True)
    ]
    session.table(["message", "key", "attempts", "died", "held", "reason", "last error", *more], rows, empty=empty)


def _print_with_tracebacks(session: Session, letters: Sequence[DeadLetter], *, payload: bool) -> None:
    for letter in letters:
        key = "" if letter.key is None else f"  key {render.safe(letter.key)}"
        print(
            f"{letter.partition}/{letter.offset}{key}  {letter.reason} after {counted(letter.attempts, 'attempt')}, "
            f"{render.moment(letter.died_at)}: {render.safe(letter.last_error or 'no error given')}"
        )
        if payload:
            print(f"  {render.payload(letter.payload)}")
        for line in render.lines(letter.last_traceback or ""):
            print(f"    {line}")


def raised_at(traceback: str | None) -> str | None:
    """`stock.py:12 in handle`: the last frame of a traceback."""
    frames = re.findall(r'^ *File "(.+)", line (\d+), in (.+)$', traceback or "", flags=re.MULTILINE)
    if not frames:
        return None
    path, line, function = frames[-1]
    return f"{PurePath(path).name}:{line} in {function}"


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
        which = {**_conditions(ctx), "limit": limit}
        sample: list[DeadLetter] = []
        with session.connect() as c:
            act = getattr(c, verb)
            chosen = act(topic, group, dry_run=True, **which)
            if chosen and not dry_run:
                session.confirm(f"{verb.title()} {counted(len(chosen), 'dead message')} of {topic}/{group}?", yes=yes)
                chosen = act(topic, group, reason=reason, **which)
            elif chosen and not session.json:
                sample = c.dead(topic, group, **{**which, "limit": min(limit or SAMPLE, SAMPLE)})
        if session.json:
            messages = [{"partition": partition, "offset": offset} for partition, offset in chosen]
            found = {"topic": topic, "group": group, "dry_run": dry_run, "count": len(chosen), "messages": messages}
            session.emit(found)
            return
        if sample:
            _print_letters(session, sample, payload=True)
        if len(chosen) > len(sample) > 0:
            session.say(f"… and {counted(len(chosen) - len(sample), 'more message')} (--json lists all)")
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
