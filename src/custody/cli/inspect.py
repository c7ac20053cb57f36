"""`custody trace` and `stats`: the history of a message, and the figures of a group."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from custody.cli import completion, render
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import Session, session_of
from custody.cli.status import groups_table
from custody.cli.watching import Every, Watch, watch
from custody.engine import Custody
from custody.errors import OffsetOutOfRange
from custody.model.entities import HistoryEntry, Message, Stats
from custody.model.lifecycle import JOURNAL
from custody.model.plain import plain
from custody.model.status import GroupStatus

if TYPE_CHECKING:
    from rich.table import Table


@calls(Custody.trace)
def trace(call: Call[list[HistoryEntry]], topic: str, partition: int, offset: int, group: str | None) -> None:
    """Show the history of one message in every group."""
    if group is not None:
        call.c.group(topic, group)  # raises if there is none
    entries = call()
    message = _message(call.c, topic, partition, offset)
    if message is None and not entries:
        raise OffsetOutOfRange(
            f"{topic}/{partition} has no offset {offset}", f"`custody topics describe {topic}` shows its offsets."
        )
    if not call.session.json:
        _print_timeline(f"{topic}/{partition}/{offset}", message, entries)
    else:
        document = {"topic": topic, "partition": partition, "offset": offset}
        call.session.emit({**document, "message": message, "entries": entries})


def _message(c: Custody, topic: str, partition: int, offset: int) -> Message | None:
    try:
        found = c.read(topic, partition, offset=offset, max_messages=1)
    except OffsetOutOfRange:  # retention has dropped it; its history may still be there
        return None
    return found[0] if found and found[0].offset == offset else None


def _print_timeline(name: str, message: Message | None, entries: list[HistoryEntry]) -> None:
    print(name + (f"  key {render.safe(message.key)}" if message is not None and message.key is not None else ""))
    last: datetime | None = None
    if message is None:
        print("  no longer in the log")
    else:
        print(f"  {render.payload(message.payload)}")
        print(f"  {render.moment(message.published_at, milliseconds=True)}  published")
        last = message.published_at
    groups = sorted({entry.group for entry in entries})
    for group in groups:
        print(f"in group {group}")
        before = last
        for entry in entries:
            if entry.group == group:
                print(f"  {render.moment(entry.at, milliseconds=True)}  {_sentence(entry)}{_since(before, entry.at)}")
                for line in render.lines(entry.traceback or ""):
                    print(f"      {line}")
                before = entry.at
    if not groups:
        print("  not delivered to any group yet")


def _since(before: datetime | None, at: datetime) -> str:
    return "" if before is None or at < before else f"  (+{render.span(at - before)})"


def _sentence(entry: HistoryEntry) -> str:
    words = JOURNAL[entry.kind].words if entry.kind in JOURNAL else "older history was dropped"
    if entry.attempt is not None and entry.kind in ("claim", "nack", "dead"):
        words += f", attempt {entry.attempt}"
    if entry.worker is not None:
        words += f", by {render.safe(entry.worker)}"
    return words + (f": {render.safe(entry.error)}" if entry.error else "")


def stats(
    ctx: typer.Context,
    topic: Annotated[
        str | None,
        typer.Argument(help="The topic. Default: all groups of all topics.", autocompletion=completion.topics),
    ] = None,
    group: Annotated[
        str | None,
        typer.Argument(help="The group. Default: all groups of the topic.", autocompletion=completion.groups),
    ] = None,
    repeated: Watch = False,
    every: Every = "2s",
) -> None:
    """Show lag, retries, dead letters and handling times of one group, of all groups of a topic, or of all topics."""
    session = session_of(ctx)
    with session.connect() as c:
        if topic is None:
            _show_all(session, c, repeated, every)
            return
        if repeated:
            document = (lambda found: found[0]) if group is not None else (lambda found: found)
            watch(session, lambda: _figures(c, topic, group), _table, every, document)
        found = _figures(c, topic, group)
        if session.json:
            session.emit(found[0] if group is not None else found)
        else:
            _print_stats(session, found, alone=group is not None)


def _show_all(session: Session, c: Custody, repeated: bool, every: str) -> None:
    def look() -> list[GroupStatus]:
        return sorted(c.status().groups, key=lambda one: (one.topic, one.group))

    if repeated:
        watch(session, look, groups_table, every, lambda found: found)
    found = look()
    if session.json:
        session.emit(found)
    elif found:
        render.console(color=session.color).print(groups_table(found))
    else:
        session.say("There are no groups.")


def _figures(c: Custody, topic: str, group: str | None) -> list[dict[str, Any]]:
    """The figures of one group or all, each with its handling times."""
    names = [group] if group is not None else [one.name for one in c.groups(topic)]
    if group is None:
        c.topic(topic)
    times = {time.group: time for time in c.handling_times(topic, group)}
    found = []
    for name in names:
        figures: Stats = c.stats(topic, name)
        took = times.get(name)
        handling = None if took is None else {"leases": took.leases, "p50": took.p50, "p99": took.p99}
        found.append({**plain(figures), "handling": handling})
    return found


OVERVIEW = ["lag", "waiting", "in_flight", "parked", "dead", "depth"]
ON_A_PARTITION = ["partition", "frontier", "tail", "lag", "waiting", "in_flight", "parked", "dead", "holes"]


def _titles(names: list[str]) -> list[str]:
    return [name.replace("_", " ") for name in names]


def _age(at: str | None) -> str:
    return render.age(None if at is None else datetime.fromisoformat(at))


def _state(one: dict[str, Any]) -> str | None:
    states = []
    if one["paused_at"]:
        states.append(f"paused: {one['paused_reason'] or 'no reason given'}")
    elif one["breaker"] not in (None, "closed"):
        states.append(f"breaker {one['breaker']}: {one['breaker_reason'] or ''}")
    if one["bound"]:
        states.append("bound: lag and depth include messages not matched yet")
    return "; ".join(states) or None


def _table(found: list[dict[str, Any]]) -> Table:
    rows = [
        [
            one["group"],
            *(one[name] for name in OVERVIEW),
            _age(one["oldest_unresolved"]),
            render.span((one["handling"] or {"p99": None})["p99"]),
            _state(one),
        ]
        for one in found
    ]
    return render.table(["group", *_titles(OVERVIEW), "oldest", "p99", "state"], rows)


def _print_stats(session: Session, found: list[dict[str, Any]], *, alone: bool) -> None:
    if not found:
        session.say("The topic has no groups.")
    elif not alone:
        render.console(color=session.color).print(_table(found))
    else:
        (one,) = found
        took = one["handling"] or {"p50": None, "p99": None}
        figures = dict(zip(_titles([*OVERVIEW, "holes"]), (one[name] for name in [*OVERVIEW, "holes"]), strict=True))
        session.facts(
            {
                **figures,
                "oldest unresolved": _age(one["oldest_unresolved"]),
                "handling p50": render.span(took["p50"]),
                "handling p99": render.span(took["p99"]),
                "state": _state(one),
            }
        )
        print()
        lane = ["priority"] if any(partition["priority"] for partition in one["partitions"]) else []
        columns = [ON_A_PARTITION[0], *lane, *ON_A_PARTITION[1:]]
        rows = [[partition[name] for name in columns] for partition in one["partitions"]]
        session.table(_titles(columns), rows, empty="")
