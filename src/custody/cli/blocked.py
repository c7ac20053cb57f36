"""`custody blocked`: keys whose next message cannot be delivered."""

from __future__ import annotations

from typing import Annotated

import typer

from custody.cli.arguments import AtOffset, AtPartition, Group, Limit, Reason, Topic
from custody.cli.session import counted, session_of

app = typer.Typer(no_args_is_help=True, help="Blocked keys: list, release, skip.")


@app.command("list")
def list_blocked(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    limit: Limit = 1000,
) -> None:
    """List blocked keys, the message that blocks each, and how many messages wait behind it."""
    session = session_of(ctx)
    with session.connect() as c:
        keys = c.blocked_keys(topic, group, limit=limit)
    if session.json:
        session.emit(keys)
        return
    rows = [
        [
            key.key,
            key.why,
            None if key.blocked_by is None else f"{key.partition}/{key.blocked_by}",
            key.attempts,
            key.parked,
            key.since,
            key.run_at if key.why == "backoff" else None,
            key.last_error,
        ]
        for key in keys
    ]
    columns = ["key", "why", "by", "attempts", "waiting behind", "since", "due", "last error"]
    session.table(columns, rows, empty=f"No key of {topic}/{group} is blocked.")


@app.command()
def release(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    key: Annotated[str, typer.Argument(help="The key.")],
    reason: Reason = None,
) -> None:
    """Unblock a key that is held by dead messages. They stay dead."""
    session = session_of(ctx)
    with session.connect() as c:
        count = c.release_key(topic, group, key, reason=reason)
    if session.json:
        session.emit({"topic": topic, "group": group, "key": key, "released": count})
    session.say(
        f"released key {key}, which was held by {counted(count, 'dead message')}"
        if count
        else f"key {key} was not held by a dead message"
    )


@app.command()
def skip(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    partition: AtPartition,
    offset: AtOffset,
    reason: Reason = None,
) -> None:
    """Mark one waiting or dead message as done."""
    session = session_of(ctx)
    with session.connect() as c:
        c.skip(topic, group, partition, offset, reason=reason)
    if session.json:
        session.emit({"topic": topic, "group": group, "partition": partition, "offset": offset, "skipped": True})
    session.say(f"{topic}/{partition}/{offset} is done in {group}")
