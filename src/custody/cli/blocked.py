"""`custody blocked`: keys that cannot go on, and how to let them."""

from __future__ import annotations

from typing import Annotated

import typer

from custody.cli.arguments import Group, Reason, Topic
from custody.cli.session import counted, session_of

app = typer.Typer(no_args_is_help=True, help="Keys that cannot go on: list, release, skip.")


@app.command("list")
def list_blocked(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    limit: Annotated[int, typer.Option(min=1, help="No more than this many.")] = 1000,
) -> None:
    """Blocked keys, what each waits for, and how much waits behind it."""
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
    """Let a key go on past its held dead messages, which stay dead."""
    session = session_of(ctx)
    with session.connect() as c:
        count = c.release_key(topic, group, key, reason=reason)
    if session.json:
        session.emit({"topic": topic, "group": group, "key": key, "released": count})
    session.say(
        f"key {key} goes on past {counted(count, 'dead message')}"
        if count
        else f"key {key} was not held by a dead message"
    )


@app.command()
def skip(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    partition: Annotated[int, typer.Argument(help="The partition.")],
    offset: Annotated[int, typer.Argument(help="The offset.")],
    reason: Reason = None,
) -> None:
    """Count one waiting or dead message as done."""
    session = session_of(ctx)
    with session.connect() as c:
        c.skip(topic, group, partition, offset, reason=reason)
    if session.json:
        session.emit({"topic": topic, "group": group, "partition": partition, "offset": offset, "skipped": True})
    session.say(f"{topic}/{partition}/{offset} counts as done in {group}")
