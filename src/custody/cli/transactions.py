"""`custody transactions`: open transactions of producers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

import typer

from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import Session
from custody.model.entities import OpenTransaction
from custody.verbs.transactions import Transactions

app = typer.Typer(no_args_is_help=True, help="Open transactions of producers: list, abort.")


@contextmanager
def opened(session: Session) -> Iterator[Transactions]:
    with session.connect() as c:
        yield c.transactions


@app.command("list")
@calls(Transactions.open, on=opened)
def list_open(call: Call[list[OpenTransaction]]) -> None:
    call.listing(
        call(),
        [
            ("transaction", lambda one: str(one.transaction_id)),
            ("producer", "producer_id"),
            "epoch",
            "messages",
            ("leases to ack", "acks"),
            ("begun", "begun_at"),
            ("times out", "expires_at"),
        ],
        empty="No transaction is open.",
    )


@app.command()
@calls(Transactions.abort, on=opened)
def abort(call: Call[bool], transaction_id: UUID, reason: str | None) -> None:
    changed = call(reason=reason or "by an operator")
    text = f"aborted {transaction_id}" if changed else f"{transaction_id} was aborted before"
    call.report(text, aborted=True, changed=changed)
