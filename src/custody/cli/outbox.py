"""`custody outbox`: lists, replays, kills and prunes events; installs an outbox and verifies that it works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Annotated, Any
from uuid import UUID

import typer

from custody.cli import render
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.failures import FAILED
from custody.cli.session import Session, counted, operator, session_of
from custody.outbox import Event, Figures, Outbox
from custody.outbox.conformance import Finding

app = typer.Typer(name="outbox", no_args_is_help=True, help="Outbox: events that your transactions wrote.")


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
    with located(session) as url, Outbox(url, actor=operator()) as outbox:
        yield outbox


@app.command()
def install(ctx: typer.Context) -> None:
    """Create or upgrade the outbox in your own database. The rest of Custody is not installed there."""
    from custody.outbox import install as make

    session = session_of(ctx)
    with located(session) as url:
        changed = make(url)
    session.show({"changed": changed}, "the outbox is installed" if changed else "the outbox was installed already")


NAMES = {"event_type": "type", "error": "where_error"}


@app.command("list")
@calls(Outbox.events, on=opened, names=NAMES, without=["ids"])
def list_events(call: Call[list[Event]], limit: int) -> None:
    events = call()
    if call.session.json:
        call.session.emit([_plain(event) for event in events])
        return
    columns: list[render.Column] = [
        ("event", lambda event: str(event.event_id)),
        ("type", "event_type"),
        "destination",
        ("key", "ordering_key"),
        ("state", lambda event: str(event.status)),
        "attempts",
        ("changed", "updated_at"),
        "last_error",
    ]
    call.listing(events, columns, empty="No event matches.")
    if len(events) == limit:
        call.session.note(f"the first {limit:,}; there may be more (--limit)")


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
@calls(Outbox.event, on=opened)
def show(call: Call[Event]) -> None:
    event = call()
    if call.session.json:
        call.session.emit(_plain(event))
        return
    facts = {**_plain(event), "payload": render.payload(event.payload)}
    facts.pop("payload_base64", None)
    facts["headers"] = render.payload(event.headers)
    call.session.facts(facts)


@app.command()
@calls(Outbox.replay, on=opened, names=NAMES, arguments=["ids"], confirms=True)
def replay(call: Call[list[UUID]], dry_run: bool) -> None:
    """Publish events again that are DEAD (or, with --state, PUBLISHED), in order for each key."""
    chosen = call.confirmed(lambda chosen: f"Replay {counted(len(chosen), 'event')}?" if chosen else None)
    stranded = call.of("stranded", without=["dry_run", "reason", "limit"])()
    _tell(call.session, "replayed", chosen, dry_run=dry_run, stranded=stranded)
    if stranded and not call.session.json:
        call.session.note(
            f"{counted(len(stranded), 'event')} left out, because the topic was deleted: create it and replay again"
        )


@app.command()
@calls(Outbox.kill, on=opened, confirms=True)
def kill(call: Call[list[UUID]], dry_run: bool) -> None:
    chosen = call.confirmed(lambda chosen: f"Kill {counted(len(chosen), 'event')}?" if chosen else None)
    _tell(call.session, "given up", chosen, dry_run=dry_run)


def _tell(session: Session, past: str, chosen: list[UUID], *, dry_run: bool, **more: list[UUID]) -> None:
    if session.json:
        session.emit({"dry_run": dry_run, "count": len(chosen), "events": chosen, **more})
        return
    if dry_run:
        session.table(["event"], [[str(event)] for event in chosen], empty="")
    session.say(f"{counted(len(chosen), 'event')} {'would be ' if dry_run else ''}{past}")


@app.command()
@calls(Outbox.prune, on=opened, options=["older_than"], confirms=True)
def prune(
    call: Call[int],
    dry_run: bool,
    received: Annotated[
        bool, typer.Option("--received", help="Remove the stored ids of events received from other databases instead.")
    ] = False,
) -> None:
    """Remove events that have been PUBLISHED (or, with --state, DEAD) for longer than --older-than."""
    question, past = "Remove {}?", "removed"
    if received:
        call = call.of("forget", without=["states"])
        question = "Remove the ids of {}? Duplicates of them would be accepted."
        past = "forgotten"
    what = "received event" if received else "event"
    count = call.confirmed(lambda count: question.format(counted(count, what)) if count else None)
    text = f"{counted(count, 'event')} {'would be ' if dry_run else ''}{past}"
    call.show({"dry_run": dry_run, "count": count}, text)


@app.command()
@calls(Outbox.stats, on=opened, options=["window"])
def stats(
    call: Call[list[Figures]],
    window: Any,
    metrics: Annotated[bool, typer.Option("--metrics", help="Print in Prometheus' text format.")] = False,
) -> None:
    found = call()
    if metrics:
        from custody.outbox.metrics import exposition

        print(exposition(found), end="")
        return
    columns: list[render.Column] = [
        ("destination", lambda one: one.destination or "(default)"),
        "backlog",
        "due",
        "retrying",
        "claimed",
        "dead",
        ("oldest", lambda one: render.age(one.oldest_pending)),
        (f"published in {window}", "published_recently"),
    ]
    call.listing(found, columns, empty="The outbox is empty.")


@app.command()
@calls(Outbox.audit, on=opened)
def audit(call: Call[list[dict[str, Any]]]) -> None:
    names = ["at", "actor", "action", "events", "reason"]
    columns: list[render.Column] = [(name, itemgetter(name)) for name in names]
    call.listing(call(), columns, empty="No operator has changed the outbox yet.")


@app.command()
@calls(Outbox.verify, on=opened)
def verify(call: Call[list[Finding]]) -> int | None:
    """Check that the outbox conforms, in a transaction that is rolled back. Exits with 1 if a check fails."""
    session, found = call.session, call()
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
