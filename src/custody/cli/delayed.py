"""`custody delayed`: delayed messages that are not delivered yet."""

from __future__ import annotations

from typing import Annotated

import typer

from custody.cli import render
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import counted
from custody.engine import Custody
from custody.errors import CustodyError
from custody.model.entities import Waiting

app = typer.Typer(no_args_is_help=True, help="Delayed messages: list, cancel.")


@app.command("list")
@calls(Custody.delayed)
def list_delayed(call: Call[list[Waiting]], topic: str, key: str | None) -> None:
    waiting = call()
    call.listing(
        waiting,
        [
            "delay_id",
            "deliver_at",
            "partition",
            "key",
            ("payload", lambda one: render.payload(one.payload)),
        ],
        empty=f"Topic {topic} has no delayed messages.",
    )
    if key is None and (count := call.c.delayed_count(topic)) > len(waiting):
        call.session.note(f"{counted(count, 'message')} in all: --limit shows more")


@app.command()
@calls(Custody.cancel_delayed, without=["delay_id"])
def cancel(
    call: Call[None],
    topic: str,
    delay_ids: Annotated[
        list[int], typer.Argument(metavar="DELAY_ID…", help="Ids that publish returned or list shows.")
    ],
) -> None:
    """Cancel delayed messages. One that was delivered or cancelled already is refused."""
    for number, delay_id in enumerate(delay_ids):
        try:
            call(delay_id=delay_id)
        except CustodyError:
            if number:
                call.session.note(f"{counted(number, 'message')} had been cancelled before this:")
            raise
    call.report(f"cancelled {counted(len(delay_ids), 'delayed message')} of {topic}", cancelled=delay_ids)
