"""`custody outbox`: lists, replays, kills and prunes events; installs an outbox and verifies that it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from custody.cli import render
from custody.cli.arguments import DURATION, DryRun, Limit, OptionalLimit, Reason, Time, Yes
from custody.cli.failures import FAILED
from custody.cli.session import Session, counted, operator, session_of

if TYPE_CHECKING:
    from custody.outbox import Figures, Outbox

app = typer.Typer(name="outbox", no_args_is_help=True, help="Outbox: events that your transactions wrote.")

States = Annotated[
    list[str] | None, typer.Option("--state", help="PENDING, CLAIMED, PUBLISHED or DEAD; may be repeated.")
]
Ids = Annotated[list[UUID] | None, typer.Argument(help="Ids of events. Default: those that match the filters.")]
EventType = Annotated[str | None, typer.Option("--type", help="Only events of this type.")]
Destination = Annotated[str | None, typer.Option(help="Only events for this destination.")]
OrderingKey = Annotated[str | None, typer.Option(help="Only events of this ordering key.")]
WhereError = Annotated[str | None, typer.Option(metavar="LIKE", help="Only errors that match, such as 'timeout%'.")]


@contextmanager
def located(session: Session) -> Iterator[str]:
    """The URL of the outbox. A configured database is not changed; the embedded one gets all of Custody."""
    from custody.address import is_remote

    url = session.configured_url
    if url is not None and not is_remote(url):
        yield url
        return
    with session.connect() as c:
        yield c.database_url


@contextmanager
def opened(session: Session) -> Iterator[Outbox]:
    from custody.outbox import Outbox

    with located(session) as url, Outbox(url, actor=operator()) as outbox:
        yield outbox


def _states(given: list[str] | None) -> list[str] | None:
    from custody.outbox import EventState

    for state in given or ():
        if state.upper() not in EventState.__members__:
            raise typer.BadParameter(f"{state!r} is not a state. States are: {', '.join(EventState.__members__)}.")
    return [state.upper() for state in given] if given else None


@app.command()
def install(ctx: typer.Context) -> None:
    """Create or upgrade the outbox in your own database. The rest of Custody is not installed there."""
    from custody.outbox import install as make

    session = session_of(ctx)
    with located(session) as url:
        changed = make(url)
    session.show({"changed": changed}, "the outbox is installed" if changed else "the outbox was installed already")


@app.command("list")
def list_events(
    ctx: typer.Context,
    state: States = None,
    since: Time = None,
    until: Time = None,
    event_type: EventType = None,
    destination: Destination = None,
    ordering_key: OrderingKey = None,
    where_error: WhereError = None,
    limit: Limit = 100,
) -> None:
    """List events, oldest first."""
    session = session_of(ctx)
    which = _which(state, since, until, event_type, destination, ordering_key, where_error)
    with opened(session) as outbox:
        events = outbox.events(limit=limit, **which)
    if session.json:
        session.emit([_plain(event) for event in events])
        return
    rows = [
        [
            *(str(event.event_id), event.event_type, event.destination, event.ordering_key, str(event.status)),
            *(event.attempts, event.updated_at, event.last_error),
        ]
        for event in events
    ]
    columns = ["event", "type", "destination", "key", "state", "attempts", "changed", "last error"]
    session.table(columns, rows, empty="No event matches.")
    if len(events) == limit:
        session.note(f"the first {limit:,}; there may be more (--limit)")


def _which(
    state: list[str] | None,
    since: datetime | None,
    until: datetime | None,
    event_type: str | None,
    destination: str | None,
    ordering_key: str | None,
    error: str | None,
) -> dict[str, Any]:
    return {
        "states": _states(state),
        "since": since,
        "until": until,
        "event_type": event_type,
        "destination": destination,
        "ordering_key": ordering_key,
        "error": error,
    }


def _plain(event: Any) -> dict[str, Any]:
    import base64

    import msgspec

    found: dict[str, Any] = msgspec.structs.asdict(event)
    payload = found.pop("payload")
    if isinstance(payload, bytes):
        found["payload_base64"] = base64.b64encode(payload).decode()
    else:
        found["payload"] = payload
    return {**found, "status": str(event.status)}


@app.command()
def show(ctx: typer.Context, event_id: Annotated[UUID, typer.Argument(help="The event.")]) -> None:
    """Show one event with its payload, headers and history."""
    session = session_of(ctx)
    with opened(session) as outbox:
        event = outbox.event(event_id)
    if session.json:
        session.emit(_plain(event))
        return
    facts = {**_plain(event), "payload": render.payload(event.payload)}
    facts.pop("payload_base64", None)
    facts["headers"] = render.payload(event.headers)
    session.facts(facts)


@app.command()
def replay(
    ctx: typer.Context,
    ids: Ids = None,
    state: States = None,
    since: Time = None,
    until: Time = None,
    event_type: EventType = None,
    destination: Destination = None,
    ordering_key: OrderingKey = None,
    where_error: WhereError = None,
    limit: OptionalLimit = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Publish events again that are DEAD (or, with --state, PUBLISHED), in order for each key."""
    session = session_of(ctx)
    which = _which(state or ["DEAD"], since, until, event_type, destination, ordering_key, where_error)
    which |= {"ids": ids or None}
    with opened(session) as outbox:
        chosen = outbox.replay(dry_run=True, limit=limit, **which)
        stranded = outbox.stranded(**which)
        if chosen and not dry_run:
            session.confirm(f"Replay {counted(len(chosen), 'event')}?", yes=yes)
            chosen = outbox.replay(reason=reason, limit=limit, **which)
    _tell(session, "replayed", chosen, dry_run=dry_run, stranded=stranded)
    if stranded and not session.json:
        session.note(
            f"{counted(len(stranded), 'event')} left out, because the topic was deleted: create it and replay again"
        )


@app.command()
def kill(
    ctx: typer.Context,
    ids: Annotated[list[UUID], typer.Argument(help="Events by their event_id.")],
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Make events DEAD that are not published yet."""
    session = session_of(ctx)
    with opened(session) as outbox:
        chosen = outbox.kill(ids, dry_run=True)
        if chosen and not dry_run:
            session.confirm(f"Kill {counted(len(chosen), 'event')}?", yes=yes)
            chosen = outbox.kill(ids, reason=reason)
    _tell(session, "given up", chosen, dry_run=dry_run)


def _tell(session: Session, past: str, chosen: list[UUID], *, dry_run: bool, **more: list[UUID]) -> None:
    if session.json:
        session.emit({"dry_run": dry_run, "count": len(chosen), "events": chosen, **more})
        return
    if dry_run:
        session.table(["event"], [[str(event)] for event in chosen], empty="")
    session.say(f"{counted(len(chosen), 'event')} {'would be ' if dry_run else ''}{past}")


@app.command()
def prune(
    ctx: typer.Context,
    older_than: Annotated[Any, typer.Option(help="Only events older than this.", **DURATION)],
    state: States = None,
    received: Annotated[
        bool, typer.Option("--received", help="Remove the stored ids of events received from other databases instead.")
    ] = False,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Remove events that have been PUBLISHED (or, with --state, DEAD) for longer than --older-than."""
    session = session_of(ctx)
    states = _states(state) or ["PUBLISHED"]
    with opened(session) as outbox:
        if received:
            count = outbox.forget(older_than, dry_run=True)
            if count and not dry_run:
                forgotten = (
                    f"Remove the ids of {counted(count, 'received event')}? Duplicates of them would be accepted."
                )
                session.confirm(forgotten, yes=yes)
                count = outbox.forget(older_than, reason=reason)
        else:
            count = outbox.prune(older_than, states=states, dry_run=True)
            if count and not dry_run:
                session.confirm(f"Remove {counted(count, 'event')}?", yes=yes)
                count = outbox.prune(older_than, states=states, reason=reason)
    if session.json:
        session.emit({"dry_run": dry_run, "count": count})
        return
    session.say(f"{counted(count, 'event')} {'would be ' if dry_run else ''}{'forgotten' if received else 'removed'}")


@app.command()
def stats(
    ctx: typer.Context,
    window: Annotated[Any, typer.Option(help="Time that counts as recent.", **DURATION)] = "1m",
    metrics: Annotated[bool, typer.Option("--metrics", help="Print in Prometheus' text format.")] = False,
) -> None:
    """Show backlog, age, rate and failures of each destination."""
    session = session_of(ctx)
    with opened(session) as outbox:
        found = outbox.stats(window)
    if metrics:
        from custody.outbox.metrics import exposition

        print(exposition(found), end="")
    elif session.json:
        session.emit(found)
    else:
        columns = ["destination", "backlog", "due", "retrying", "claimed", "dead", "oldest", f"published in {window}"]
        rows = [
            [
                *(one.destination or "(default)", one.backlog, one.due, one.retrying, one.claimed, one.dead),
                *(_age(one), one.published_recently),
            ]
            for one in found
        ]
        session.table(columns, rows, empty="The outbox is empty.")


def _age(one: Figures) -> str:
    at = one.oldest_pending
    return render.span(None if at is None else max(0.0, (datetime.now(UTC) - at).total_seconds()))


@app.command()
def audit(ctx: typer.Context, limit: Limit = 1000) -> None:
    """List what operators did to the outbox, newest first: replays, kills and prunes."""
    session = session_of(ctx)
    with opened(session) as outbox:
        records = outbox.audit(limit=limit)
    if session.json:
        session.emit(records)
        return
    rows = [[one["at"], one["actor"], one["action"], one["events"], one["reason"]] for one in records]
    session.table(["at", "actor", "action", "events", "reason"], rows, empty="No operator has changed the outbox yet.")


@app.command()
def verify(ctx: typer.Context) -> int | None:
    """Check that the outbox conforms, in a transaction that is rolled back. Exits with 1 if a check fails."""
    session = session_of(ctx)
    with opened(session) as outbox:
        found = outbox.verify()
    failed = [one for one in found if not one.passed]
    if session.json:
        session.emit({"conforms": not failed, "checks": found})
    else:
        for one in found:
            print(f"{one.id:<6} {one.level:<6}  {'ok  ' if one.passed else 'FAIL'}  {one.text}")
            if one.error is not None:
                print(f"        {render.safe(one.error)}")
        session.say(f"{len(found) - len(failed)} of {counted(len(found), 'check')} passed")
    return FAILED if failed else None
