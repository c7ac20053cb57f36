"""`custody blocked`: keys whose next message cannot be delivered."""

from __future__ import annotations

import typer

from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import counted
from custody.engine import Custody
from custody.model.entities import BlockedKey

app = typer.Typer(no_args_is_help=True, help="Blocked keys: list, release, skip.")


@app.command("list")
@calls(Custody.blocked_keys)
def list_blocked(call: Call[list[BlockedKey]], topic: str, group: str) -> None:
    call.listing(
        call(),
        [
            "key",
            "why",
            ("by", lambda key: None if key.blocked_by is None else f"{key.partition}/{key.blocked_by}"),
            "attempts",
            ("waiting behind", "parked"),
            "since",
            ("due", lambda key: key.run_at if key.why == "backoff" else None),
            "last_error",
        ],
        empty=f"No key of {topic}/{group} is blocked.",
    )


@app.command()
@calls(Custody.release_key, arguments=["key"])
def release(call: Call[int], key: str) -> None:
    count = call()
    held = f"released key {key}, which was held by {counted(count, 'dead message')}"
    call.report(held if count else f"key {key} was not held by a dead message", released=count)


@app.command()
@calls(Custody.skip)
def skip(call: Call[None], topic: str, group: str, partition: int, offset: int) -> None:
    call()
    call.report(f"{topic}/{partition}/{offset} is done in {group}", skipped=True)
