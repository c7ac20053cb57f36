"""`custody rewind`, `retry`, `pause` and `resume`."""

from __future__ import annotations

from typing import Annotated

import typer

from custody.cli.arguments import DryRun, Group, Partition, Reason, Time, Topic, Yes
from custody.cli.session import counted, session_of, single


def rewind(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    to_offset: Annotated[int | None, typer.Option(min=0, help="First offset to deliver again.")] = None,
    to_time: Time = None,
    partition: Partition = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Deliver all messages from an offset or a time on again. Leases of those messages are revoked."""
    session = session_of(ctx)
    single(to_offset=to_offset is not None, to_time=to_time)
    if to_offset is None and to_time is None:
        raise typer.BadParameter("give --to-offset or --to-time")
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


def retry(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    key: Annotated[str | None, typer.Option(help="Only messages of this key.")] = None,
    where_error: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Only messages whose last error is LIKE this pattern.")
    ] = None,
    reason: Reason = None,
) -> None:
    """Make messages that wait for a retry due now: all, or those that match the filters."""
    session = session_of(ctx)
    with session.connect() as c:
        count = c.retry_now(topic, group, key=key, where_error=where_error, reason=reason)
    if session.json:
        session.emit({"topic": topic, "group": group, "count": count})
    session.say(f"{counted(count, 'waiting message')} due now")


def pause(ctx: typer.Context, topic: Topic, group: Group, reason: Reason = None) -> None:
    """Stop delivering messages to a group. Messages in flight can still be settled."""
    session = session_of(ctx)
    with session.connect() as c:
        changed = c.pause(topic, group, reason=reason)
    if session.json:
        session.emit({"topic": topic, "group": group, "paused": True, "changed": changed})
    session.say(f"{topic}/{group} {'is paused' if changed else 'was paused already'}")


def resume(ctx: typer.Context, topic: Topic, group: Group) -> None:
    """Deliver messages to a paused group again. Also closes an open circuit breaker."""
    session = session_of(ctx)
    with session.connect() as c:
        changed = c.resume(topic, group)
    if session.json:
        session.emit({"topic": topic, "group": group, "paused": False, "changed": changed})
    session.say(f"{topic}/{group} {'is resumed' if changed else 'was not paused'}")
