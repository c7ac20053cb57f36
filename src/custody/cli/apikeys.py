"""`custody apikeys`: API keys of the HTTP server and their rights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from custody.cli.arguments import DURATION
from custody.cli.session import session_of

if TYPE_CHECKING:
    from custody.verbs.apikeys import ApiKey

app = typer.Typer(no_args_is_help=True, help="API keys of the HTTP server: create, list, revoke.")

Name = Annotated[str, typer.Argument(help="Name of the key, such as its user.")]


def _right(what: str) -> Any:
    return typer.Option(metavar="PATTERN", help=f"Topics that the key may {what}: orders, orders-*, *.")


@app.command()
def create(
    ctx: typer.Context,
    name: Name,
    produce: Annotated[list[str] | None, _right("publish to")] = None,
    consume: Annotated[list[str] | None, _right("read and receive from")] = None,
    admin: Annotated[list[str] | None, _right("do anything with")] = None,
    expires: Annotated[Any, typer.Option(help="Lifetime of the key, such as 90d.", **DURATION)] = None,
) -> None:
    """Create a key. Its secret is printed once and cannot be shown again."""
    session = session_of(ctx)
    if not (produce or consume or admin):
        raise typer.BadParameter("a key needs a right: --produce, --consume or --admin, each with a pattern of topics")
    with session.connect() as c:
        made = c.create_api_key(name, produce=produce or (), consume=consume or (), admin=admin or (), expires=expires)
    if session.json:
        session.emit(made)
        return
    print(made.secret)
    session.note(f"This is the secret of key {name}. It cannot be shown again. Send it as: Authorization: Bearer …")


@app.command("list")
def list_keys(
    ctx: typer.Context, everything: Annotated[bool, typer.Option("--all", help="Include revoked keys.")] = False
) -> None:
    """List the keys and their rights, without secrets."""
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
    session.table(columns, rows, empty="There are no keys.")


def _joined(patterns: tuple[str, ...]) -> str | None:
    return " ".join(patterns) or None


def _now(key: ApiKey) -> str:
    if key.active:
        return "in use"
    return "expired" if key.revoked_at is None else "revoked"


@app.command()
def revoke(ctx: typer.Context, name: Name) -> None:
    """Revoke a key. Servers refuse it within 5 seconds."""
    session = session_of(ctx)
    with session.connect() as c:
        changed = c.revoke_api_key(name)
        left = len(c.api_keys())
    if session.json:
        session.emit({"name": name, "revoked": changed, "left": left})
        return
    session.say(f"revoked {name}" if changed else f"{name} was already revoked")
    if not left:
        session.note(
            "That was the last key: servers refuse all calls. Create a key, or start one with `custody serve --open`."
        )
