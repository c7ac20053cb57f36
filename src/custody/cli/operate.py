"""`custody rewind`, `pause` and `resume`."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from custody.cli import arguments
from custody.cli.arguments import DryRun, Group, Partition, Reason, Topic, Yes
from custody.cli.session import counted, session_of, single


def rewind(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    to_offset: Annotated[int | None, typer.Option(min=0, help="The first offset to be delivered again.")] = None,
    to_time: Annotated[
        datetime | None,
        typer.Option(parser=arguments.time, metavar="TIME", help="2030-01-31T12:00Z, or 15m: so long ago."),
    ] = None,
    partition: Partition = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Deliver everything from an offset or a time on again. Leases over it are revoked."""
    session = session_of(ctx)
    single(to_offset=to_offset is not None, to_time=to_time)
    if to_offset is None and to_time is None:
        raise typer.BadParameter("say where to: --to-offset or --to-time")
    with session.connect() as c:
        found = c.rewind(topic, group, to_offset=to_offset, to_time=to_time, partition=partition, dry_run=True)
        count = sum(one.messages for one in found)
        if count and not dry_run:
            session.confirm(f"Rewind {topic}/{group}: deliver {counted(count, 'message')} again?", yes=yes)
            found = c.rewind(topic, group, to_offset=to_offset, to_time=to_time, partition=partition, reason=reason)
            count = sum(one.messages for one in found)
    if session.json:
        session.emit({"topic": topic, "group": group, "dry_run": dry_run, "messages": count, "partitions": found})
        return
    session.table(
        ["partition", "from offset", "messages"], [[p.partition, p.target, p.messages] for p in found], empty=""
    )
    session.say(f"{counted(count, 'message')} {'would be' if dry_run else 'will be'} delivered again")


def pause(ctx: typer.Context, topic: Topic, group: Group, reason: Reason = None) -> None:
    """Stop handing out messages of a group; what is in flight can still be settled."""
    session = session_of(ctx)
    with session.connect() as c:
        changed = c.pause(topic, group, reason=reason)
    if session.json:
        session.emit({"topic": topic, "group": group, "paused": True, "changed": changed})
    session.say(f"{topic}/{group} {'is paused' if changed else 'was paused already'}")


def resume(ctx: typer.Context, topic: Topic, group: Group) -> None:
    """Go on handing out messages of a group."""
    session = session_of(ctx)
    with session.connect() as c:
        changed = c.resume(topic, group)
    if session.json:
        session.emit({"topic": topic, "group": group, "paused": False, "changed": changed})
    session.say(f"{topic}/{group} {'goes on' if changed else 'was not paused'}")
