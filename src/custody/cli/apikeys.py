"""`custody apikeys`: who may call a server, and what for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from custody.cli import arguments
from custody.cli.session import session_of

if TYPE_CHECKING:
    from custody.verbs.apikeys import ApiKey

app = typer.Typer(no_args_is_help=True, help="Keys of the HTTP server: create, list, revoke.")

Name = Annotated[str, typer.Argument(help="The name of the key: who uses it.")]


def _right(what: str) -> Any:
    return typer.Option(metavar="PATTERN", help=f"Topics that it may {what}: orders, orders-*, *.")


@app.command()
def create(
    ctx: typer.Context,
    name: Name,
    produce: Annotated[list[str] | None, _right("publish to")] = None,
    consume: Annotated[list[str] | None, _right("read and receive from")] = None,
    admin: Annotated[list[str] | None, _right("do anything with")] = None,
    expires: Annotated[
        Any, typer.Option(parser=arguments.duration, metavar="DURATION", help="How long it is good for: 90d.")
    ] = None,
) -> None:
    """Make a key. Its secret is shown once, here."""
    session = session_of(ctx)
    if not (produce or consume or admin):
        raise typer.BadParameter("a key needs a right: --produce, --consume or --admin, each with a pattern of topics")
    with session.connect() as c:
        made = c.create_api_key(name, produce=produce or (), consume=consume or (), admin=admin or (), expires=expires)
    if session.json:
        session.emit(made)
        return
    print(made.secret)
    session.note(f"This is the key {name}, and it is not shown again. Send it as: Authorization: Bearer …")


@app.command("list")
def list_keys(
    ctx: typer.Context, everything: Annotated[bool, typer.Option("--all", help="The revoked ones too.")] = False
) -> None:
    """The keys and their rights, without their secrets."""
    session = session_of(ctx)
    with session.connect() as c:
        found = c.api_keys(revoked=everything)
    if session.json:
        session.emit(found)
        return
    rows = [
        [k.name, *map(_joined, (k.produce, k.consume, k.admin)), k.created_at, k.expires_at, _now(k)] for k in found
    ]
    columns = ["name", "produce", "consume", "admin", "created", "expires", ""]
    session.table(columns, rows, empty="There are no keys: a server on this machine asks for none.")


def _joined(patterns: tuple[str, ...]) -> str | None:
    return " ".join(patterns) or None


def _now(key: ApiKey) -> str:
    if key.active:
        return "in use"
    return "expired" if key.revoked_at is None else "revoked"


@app.command()
def revoke(ctx: typer.Context, name: Name) -> None:
    """A key opens nothing any more. Servers notice within 5 seconds."""
    session = session_of(ctx)
    with session.connect() as c:
        changed = c.revoke_api_key(name)
        left = len(c.api_keys())
    if session.json:
        session.emit({"name": name, "revoked": changed, "left": left})
        return
    session.say(f"revoked {name}" if changed else f"{name} was revoked before")
    if not left:
        session.note("That was the last key: a server that only this machine reaches asks for none now.")
