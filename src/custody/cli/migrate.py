"""`custody migrate`: the schema of the database, and what a migration would do."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from custody.cli.arguments import DURATION
from custody.cli.logs import Format, Level, logged
from custody.cli.session import Session, session_of, single


def migrate(
    ctx: typer.Context,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show the steps, their locks and how long they take; change nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the statements that would be run; change nothing.")
    ] = False,
    wait: Annotated[Any, typer.Option(help="How long to try to get the locks.", **DURATION)] = "60s",
) -> None:
    """Upgrade the schema of the database to this version of Custody.

    Programs of the release before go on meanwhile: their calls wait for a fraction of a second. If a long transaction
    holds a lock, it lets the others go on and tries again. All of it happens, or nothing.
    """
    import custody
    from custody.connection import planned

    session = session_of(ctx)
    single(plan=plan, dry_run=dry_run)
    if plan or dry_run:
        _show(session, planned(session.database, home=session.home), statements=dry_run)
        return
    url = session.configured_url
    with logged(session, Level.WARNING, Format.TEXT):
        # opening the embedded database migrates it
        applied = custody.migrate(url, wait=wait) if url is not None else []
    with session.connect() as c:
        version = c.server().schema_version
    if session.json:
        session.emit({"applied": applied, "schema_version": version})
    done = f"applied {', '.join(map(str, applied))}; " if applied else ""
    session.say(f"{done}the schema is at version {version}")


def _show(session: Session, steps: list[Any], *, statements: bool) -> None:
    if session.json:
        session.emit({"steps": steps})
    elif not steps:
        session.say("There is nothing to do.")
    elif statements:
        for step in steps:
            print(f"-- {step.name}" if step.version is None else f"-- version {step.version}: {step.name}")
            print(f"{step.sql}" if step.sql else "-- (from the files of this release)")
    else:
        for step in steps:
            number = "" if step.version is None else f"version {step.version}: "
            print(f"{number}{step.name} ({step.takes})")
            print(f"  locks {', '.join(step.locks) or 'nothing that exists'}")
            if step.before:
                print(f"  run before: {step.before}")
