"""`custody pipeline state`: the states that a keyed pipeline keeps for keys."""

from __future__ import annotations

import typer

from custody.cli import render
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import counted
from custody.engine import Custody
from custody.model.entities import StoredState

app = typer.Typer(no_args_is_help=True, help="States of keys: list, delete.")


@app.command("list")
@calls(Custody.key_states)
def list_states(call: Call[list[StoredState]], topic: str, group: str) -> None:
    call.listing(
        call(),
        [
            "key",
            ("state", lambda one: render.payload(one.state)),
            ("message", lambda one: f"{one.partition}/{one.offset}"),
            "updated_at",
            "expires_at",
        ],
        empty=f"No key of {topic}/{group} has a state.",
    )


@app.command()
@calls(Custody.delete_key_states, confirms=True)
def delete(call: Call[int], topic: str, group: str, key: str | None, every: bool) -> None:
    """Remove the state of a key (--key), or of every key (--every): its next message finds none."""
    if every:
        call.confirm(f"Remove the states of all keys of {topic}/{group}?")
    count = call()
    what = "" if key is None else f" of key {key}"
    call.report(f"removed {counted(count, 'state')}{what}", count=count)
