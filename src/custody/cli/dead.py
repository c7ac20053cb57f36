"""`custody dead`, `redrive`, `discard` and `replay`: dead letters."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Annotated

import typer

from custody.cli import render
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import Session, counted
from custody.engine import Custody
from custody.model.entities import DeadLetter, Replayed

SAMPLE = 10
"""Messages that a dry run shows in full."""


@calls(Custody.dead)
def dead(
    call: Call[list[DeadLetter]],
    topic: str,
    group: str,
    limit: int,
    payload: Annotated[bool, typer.Option("--payload", help="Show the payloads too.")] = False,
    traceback: Annotated[bool, typer.Option("--traceback", "-t", help="Show the end of each traceback too.")] = False,
) -> None:
    session, letters = call.session, call()
    if session.json:
        session.emit(letters)
        return
    if traceback and letters:
        _print_with_tracebacks(letters, payload=payload)
    else:
        filtered = call.given.keys() - {"topic", "group", "limit"}
        what = "no dead letters that match" if filtered else "no dead letters"
        _print_letters(session, letters, payload=payload, empty=f"Group {group} of topic {topic} has {what}.")
    if len(letters) == limit:
        session.note(f"the first {limit:,}; there may be more (--limit)")


def _print_letters(session: Session, letters: Sequence[DeadLetter], *, payload: bool, empty: str = "") -> None:
    columns: list[render.Column] = [
        ("message", lambda letter: f"{letter.partition}/{letter.offset}"),
        "key",
        "attempts",
        ("died", "died_at"),
        "held",
        "reason",
        "last_error",
    ]
    if any(raised_at(letter.last_traceback) for letter in letters):
        columns.append(("raised at", lambda letter: raised_at(letter.last_traceback)))
    if payload:
        columns.append(("payload", lambda letter: render.payload(letter.payload)))
    session.table(*render.columns(columns, letters), empty=empty)


def _print_with_tracebacks(letters: Sequence[DeadLetter], *, payload: bool) -> None:
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


def _on_dead(verb: Callable[..., list[tuple[int, int]]], past: str) -> Callable[..., int | None]:
    """A command that acts on dead messages, after a confirmation."""

    @calls(verb, confirms=True)
    def command(call: Call[list[tuple[int, int]]], topic: str, group: str, dry_run: bool, limit: int | None) -> None:
        act = verb.__name__.title()
        chosen = call.confirmed(
            lambda chosen: f"{act} {counted(len(chosen), 'dead message')} of {topic}/{group}?" if chosen else None
        )
        messages = [{"partition": partition, "offset": offset} for partition, offset in chosen]
        if dry_run and chosen and not call.session.json:
            which = {name: value for name, value in call.given.items() if name not in ("dry_run", "reason")}
            sample = call.c.dead(**{**which, "limit": min(limit or SAMPLE, SAMPLE)})
            _print_letters(call.session, sample, payload=True)
            if len(chosen) > len(sample):
                call.session.say(f"… and {counted(len(chosen) - len(sample), 'more message')} (--json lists all)")
        text = f"{counted(len(chosen), 'dead message')} {'would be ' if dry_run else ''}{past}"
        call.report(text, dry_run=dry_run, count=len(chosen), messages=messages)

    return command


redrive = _on_dead(Custody.redrive, "redriven")
discard = _on_dead(Custody.discard, "discarded")


@calls(Custody.replay, names={"target_topic": "to"})
def replay(call: Call[Replayed], dlq_topic: str, partition: int, offset: int) -> None:
    session, replayed = call.session, call()
    if session.json:
        session.emit(replayed)
        return
    where = f"{replayed.topic}/{replayed.partition}/{replayed.offset}"
    said = "was replayed before, as" if replayed.duplicate else "replayed as"
    session.say(f"{dlq_topic}/{partition}/{offset} {said} {where}")
    if not replayed.resolved:
        session.note("the message was no longer dead: it had been redriven or discarded")
