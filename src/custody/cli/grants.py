"""`custody grants`: least rights for roles of the database."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from custody.cli.session import counted, session_of


class Role(StrEnum):
    readonly = "readonly"
    producer = "producer"
    app = "app"
    worker = "worker"
    operator = "operator"


def grants(
    ctx: typer.Context,
    role: Annotated[Role | None, typer.Option(help="What the role of the database is for.")] = None,
    to: Annotated[
        str | None, typer.Option(metavar="NAME", help="The role of the database (default: custody_ and the role).")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Run the statements instead of printing them.")] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="Take all rights from --to instead.")] = False,
) -> None:
    """Give a role of the database the rights that it needs, and take what it has beyond them. Run it as the owner.

    readonly: look at everything. producer: publish. app: publish and consume. worker: also pipelines and relays.
    operator: also topics, groups, dead letters, upkeep and `custody serve`; only migrations need the owner.
    """
    session = session_of(ctx)
    if revoke and (role is not None or to is None):
        raise typer.BadParameter("--revoke needs --to, and no --role")
    if not revoke and role is None:
        raise typer.BadParameter("give --role: " + ", ".join(Role))
    name = to or f"custody_{role}"
    with session.connect() as c:
        if role is None:
            script = c.revoke_grants(to=name, apply=apply)
        else:
            script = c.grants(role.value, to=name, apply=apply)
    if session.json:
        session.emit({"role": role, "to": name, "applied": apply, "statements": script})
    elif not apply:
        print("\n".join(["BEGIN;", *(f"{statement};" for statement in script), "COMMIT;"]))
    else:
        what = "no rights on Custody's schema" if role is None else f"the rights of role {role}, and no others"
        session.say(f"{name} has {what} ({counted(len(script), 'statement')})")
