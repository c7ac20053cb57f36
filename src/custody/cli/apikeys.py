"""`custody apikeys`: API keys of the HTTP server and their rights."""

from __future__ import annotations

import typer

from custody.cli.call import Call
from custody.cli.derived import calls
from custody.engine import Custody
from custody.verbs.apikeys import ApiKey, NewKey

app = typer.Typer(no_args_is_help=True, help="API keys of the HTTP server: create, list, revoke.")


@app.command()
@calls(Custody.create_api_key)
def create(call: Call[NewKey], name: str) -> None:
    """Create a key. Its secret is printed once and cannot be shown again."""
    if not call.given.keys() & {"produce", "consume", "admin"}:
        raise typer.BadParameter("a key needs a right: --produce, --consume or --admin, each with a pattern of topics")
    made = call()
    if call.session.json:
        call.session.emit(made)
        return
    print(made.secret)
    call.session.note(
        f"This is the secret of key {name}. It cannot be shown again. Send it as: Authorization: Bearer …"
    )


@app.command("list")
@calls(Custody.api_keys, names={"revoked": "all"})
def list_keys(call: Call[list[ApiKey]]) -> None:
    call.listing(
        call(),
        [
            "name",
            ("produce", lambda key: " ".join(key.produce) or None),
            ("consume", lambda key: " ".join(key.consume) or None),
            ("admin", lambda key: " ".join(key.admin) or None),
            ("created", "created_at"),
            ("expires", "expires_at"),
            ("", _now),
        ],
        empty="There are no keys.",
    )


def _now(key: ApiKey) -> str:
    if key.active:
        return "in use"
    return "expired" if key.revoked_at is None else "revoked"


@app.command()
@calls(Custody.revoke_api_key)
def revoke(call: Call[bool], name: str) -> None:
    changed = call()
    left = len(call.c.api_keys())
    call.report(f"revoked {name}" if changed else f"{name} was already revoked", revoked=changed, left=left)
    if not left and not call.session.json:
        call.session.note(
            "That was the last key: servers refuse all calls. Create a key, or start one with `custody serve --open`."
        )
