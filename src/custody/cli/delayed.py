"""`custody delayed`: delayed messages that are not delivered yet."""

from __future__ import annotations

from typing import Annotated

import typer

from custody.cli import render
from custody.cli.arguments import Limit, Topic
from custody.cli.session import counted, session_of
from custody.errors import CustodyError

app = typer.Typer(no_args_is_help=True, help="Delayed messages: list, cancel.")


@app.command("list")
def list_delayed(
    ctx: typer.Context,
    topic: Topic,
    key: Annotated[str | None, typer.Option("--key", "-k", help="Only messages of this key.")] = None,
    limit: Limit = 100,
) -> None:
    """List the delayed messages of a topic, the next one first."""
    session = session_of(ctx)
    with session.connect() as c:
        waiting = c.delayed(topic, key=key, limit=limit)
        count = c.delayed_count(topic)
    if session.json:
        session.emit(waiting)
        return
    rows = [[w.delay_id, w.deliver_at, w.partition, w.key, render.payload(w.payload)] for w in waiting]
    session.table(
        ["delay id", "deliver at", "partition", "key", "payload"], rows, empty=f"Topic {topic} has no delayed messages."
    )
    if count > len(waiting) and key is None:
        session.note(f"{counted(count, 'message')} in all: --limit shows more")


@app.command()
def cancel(
    ctx: typer.Context,
    topic: Topic,
    delay_ids: Annotated[
        list[int], typer.Argument(metavar="DELAY_ID…", help="Ids that publish returned or list shows.")
    ],
) -> None:
    """Cancel delayed messages. One that was delivered or cancelled already is refused."""
    session = session_of(ctx)
    with session.connect() as c:
        for number, delay_id in enumerate(delay_ids):
            try:
                c.cancel_delayed(topic, delay_id)
            except CustodyError:
                if number:
                    session.note(f"{counted(number, 'message')} had been cancelled before this:")
                raise
    if session.json:
        session.emit({"topic": topic, "cancelled": delay_ids})
    session.say(f"cancelled {counted(len(delay_ids), 'delayed message')} of {topic}")
