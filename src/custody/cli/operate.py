"""`custody rewind`, `retry`, `pause` and `resume`."""

from __future__ import annotations

from datetime import datetime

import typer

from custody.cli import render
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import counted, single
from custody.engine import Custody
from custody.model.entities import Rewound


@calls(Custody.rewind, confirms=True)
def rewind(
    call: Call[list[Rewound]], topic: str, group: str, to_offset: int | None, to_time: datetime | None, dry_run: bool
) -> None:
    single(to_offset=to_offset is not None, to_time=to_time)
    if to_offset is None and to_time is None:
        raise typer.BadParameter("give --to-offset or --to-time")
    found = call.confirmed(
        lambda found: f"Rewind {topic}/{group}: deliver {_counted(found)} again?" if _count(found) else None
    )
    if not call.session.json:
        columns: list[render.Column] = ["partition", ("from offset", "target"), "messages"]
        call.session.table(*render.columns(columns, found), empty="")
    text = f"{_counted(found)} {'would be' if dry_run else 'will be'} delivered again"
    call.report(text, dry_run=dry_run, messages=_count(found), partitions=found)


def _count(found: list[Rewound]) -> int:
    return sum(one.messages for one in found)


def _counted(found: list[Rewound]) -> str:
    return counted(_count(found), "message")


@calls(Custody.retry_now)
def retry(call: Call[int]) -> None:
    count = call()
    call.report(f"{counted(count, 'waiting message')} due now", count=count)


@calls(Custody.pause)
def pause(call: Call[bool], topic: str, group: str) -> None:
    changed = call()
    call.report(f"{topic}/{group} {'is paused' if changed else 'was paused already'}", paused=True, changed=changed)


@calls(Custody.resume)
def resume(call: Call[bool], topic: str, group: str) -> None:
    changed = call()
    call.report(f"{topic}/{group} {'is resumed' if changed else 'was not paused'}", paused=False, changed=changed)
