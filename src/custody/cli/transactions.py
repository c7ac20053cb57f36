"""`custody transactions`: open transactions of producers."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from custody.cli.session import session_of

app = typer.Typer(no_args_is_help=True, help="Open transactions of producers: list, abort.")


@app.command("list")
def list_open(ctx: typer.Context) -> None:
    """List open transactions, the oldest first. Each times out by itself."""
    session = session_of(ctx)
    with session.connect() as c:
        found = c.transactions.open()
    if session.json:
        session.emit(found)
        return
    rows = [
        [str(t.transaction_id), t.producer_id, t.epoch, t.messages, t.acks, t.begun_at, t.expires_at] for t in found
    ]
    columns = ["transaction", "producer", "epoch", "messages", "leases to ack", "begun", "times out"]
    session.table(columns, rows, empty="No transaction is open.")


@app.command()
def abort(
    ctx: typer.Context,
    transaction_id: Annotated[UUID, typer.Argument(help="Its id.")],
    reason: Annotated[str | None, typer.Option(help="Reason, shown to the producer.")] = None,
) -> None:
    """Abort a transaction: none of its messages and acks take effect."""
    session = session_of(ctx)
    with session.connect() as c:
        changed = c.transactions.abort(transaction_id, reason=reason or "by an operator")
    if session.json:
        session.emit({"transaction_id": transaction_id, "aborted": True, "changed": changed})
    session.say(f"aborted {transaction_id}" if changed else f"{transaction_id} was aborted before")
