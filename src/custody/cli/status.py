"""`custody status` and `custody workers`: everything at one look, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from custody.cli import render
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import counted
from custody.cli.watching import Every, Watch, watch
from custody.engine import Custody
from custody.model.status import GroupStatus, ScheduleStatus, Status, WorkerStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

MOST = 20
"""Groups that are shown if --limit does not say how many."""


@calls(Custody.status)
def status(
    call: Call[Status],
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Most groups to show (0: all).")] = MOST,
    repeated: Watch = False,
    every: Every = "2s",
) -> None:
    """Show all topics and groups, the worst first: what is wrong, lag, rates, workers; the outbox and schedules."""
    session = call.session
    if repeated:
        watch(session, call, lambda found: picture(found, limit), every, lambda found: found)
    found = call()
    if session.json:
        session.emit(found)
    else:
        render.console(color=session.color).print(picture(found, limit))


def picture(found: Status, limit: int) -> RenderableType:
    """The status as text for people."""
    from rich.console import Group

    parts: list[RenderableType] = [_summary(found)]
    shown = found.groups[:limit] if limit else found.groups
    if shown:
        parts.append(groups_table(shown))
    if len(found.groups) > len(shown):
        rest = found.groups[len(shown) :]
        wrong = sum(bool(one.trouble) for one in rest)
        parts.append(render.text(f"… and {counted(len(rest), 'more group')}, {wrong:,} in trouble (--limit 0: all)"))
    backlog = [one for one in found.outbox if one.backlog or one.dead]
    if backlog:
        columns: list[render.Column] = [
            ("outbox", lambda one: one.destination or "(default)"),
            "backlog",
            "due",
            "retrying",
            "claimed",
            ("dead", lambda one: render.troubled(one.dead)),
            ("oldest", lambda one: render.age(one.oldest_pending)),
        ]
        parts += [render.text(""), render.table(*render.columns(columns, backlog))]
    if found.schedules:
        parts += [render.text(""), *(render.text(render.Trouble(_sentence(one))) for one in found.schedules)]
    return Group(*parts)


def _summary(found: Status) -> RenderableType:
    wrong = sum(bool(one.trouble) for one in found.groups)
    done, claimed = sum(one.done_rate for one in found.groups), sum(one.claimed_rate for one in found.groups)
    said = (
        f"{counted(len(found.topics), 'topic')}, {counted(len(found.groups), 'group')}, {wrong:,} in trouble; "
        f"{render.rate(claimed) if claimed else 'nothing'} claimed, {render.rate(done) if done else 'nothing'} done"
    )
    return render.text(render.Trouble(said) if wrong else said)


def groups_table(groups: Sequence[GroupStatus]) -> RenderableType:
    columns: list[render.Column] = [
        ("group", lambda one: f"{one.topic}/{one.group}"),
        ("trouble", lambda one: render.Trouble(", ".join(one.trouble)) if one.trouble else None),
        "lag",
        "waiting",
        "in_flight",
        "parked",
        ("dead", lambda one: render.troubled(one.dead)),
        ("oldest", lambda one: render.span(one.oldest_unresolved_age)),
        ("claimed", lambda one: render.rate(one.claimed_rate)),
        ("done", lambda one: render.rate(one.done_rate)),
        "workers",
    ]
    if any(one.pipeline is not None for one in groups):
        columns.append("pipeline")
    return render.table(*render.columns(columns, groups))


def _sentence(one: ScheduleStatus) -> str:
    text = f"schedule {one.name} is {one.state}: a tick of {one.topic} is due {render.moment(one.next_at)}"
    return text if one.last_error is None or one.state != "failing" else f"{text}: {one.last_error}"


@calls(Custody.workers)
def workers(call: Call[list[WorkerStatus]]) -> None:
    call.listing(
        call(),
        [
            "worker",
            ("group", lambda one: f"{one.topic}/{one.group}"),
            "in_flight",
            ("oldest lease", lambda one: render.span(one.oldest_lease_age)),
            ("last claim", lambda one: "–" if one.last_claim_age is None else f"{render.span(one.last_claim_age)} ago"),
            ("claimed", lambda one: render.rate(one.claimed_rate)),
            ("done", lambda one: render.rate(one.done_rate)),
            ("failed", lambda one: render.rate(one.failed_rate)),
        ],
        empty="No worker holds messages, and none worked in the last minute.",
    )
