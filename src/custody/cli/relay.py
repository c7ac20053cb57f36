"""`custody relay run`: publishes the events of an outbox until it is stopped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from custody.cli import arguments
from custody.cli.outbox import located
from custody.cli.session import session_of
from custody.cli.work import imported, logged
from custody.model.policy import Backoff

app = typer.Typer(name="relay", no_args_is_help=True, help="Takes the events of an outbox to their destinations.")

_DURATION = {"parser": arguments.duration, "metavar": "DURATION"}


@app.callback()
def relay() -> None:
    """Takes the events of an outbox to their destinations."""


@app.command()
def run(
    ctx: typer.Context,
    publisher: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PUBLISHER serves destinations NAME:…; =PUBLISHER those of events without one."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="The most events of one claim.")] = 100,
    lease: Annotated[Any, typer.Option(help="How long a claim lasts unless it is renewed.", **_DURATION)] = "30s",
    max_attempts: Annotated[int, typer.Option(min=1, help="Attempts before an event is dead.")] = 10,
    retry_for: Annotated[
        Any, typer.Option(help="An event younger than this does not die, however often it fails.", **_DURATION)
    ] = "1d",
    max_age: Annotated[Any, typer.Option(help="An older event is dead.", **_DURATION)] = None,
    backoff: Annotated[
        Backoff | None,
        typer.Option(parser=arguments.backoff, metavar="BACKOFF", help="exponential:1s:cap=5m:jitter=0.2"),
    ] = None,
    on_dead: Annotated[str, typer.Option(help="release or hold: what a dead event does to its key.")] = "release",
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="Threads for one destination.")] = 8,
    poll: Annotated[Any, typer.Option(help="The wait between two looks.", **_DURATION)] = "200ms",
    named_only: Annotated[
        bool,
        typer.Option("--named-only", help="Serve no destination but those of --publisher: no URL that an event names."),
    ] = False,
    drain: Annotated[bool, typer.Option("--drain", help="End when nothing is left to publish.")] = False,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            envvar="CUSTODY_WEBHOOK_SECRET",
            help="Signs webhooks (whsec_…). For a rotation, put two in the variable, separated by a space.",
        ),
    ] = None,
    refused: Annotated[
        list[int] | None,
        typer.Option(min=300, max=599, help="A status of a webhook that makes its event dead (default: 410)."),
    ] = None,
    allow_network: Annotated[
        list[str] | None,
        typer.Option(help="A private network that destinations may be in, such as 10.0.0.0/8. Public ones always may."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The relay's name in claimed_by (default: host:pid).")] = None,
) -> None:
    """Publish events until SIGTERM or Ctrl-C: then it finishes what it has begun and gives back the rest."""
    from custody.relay import Relay
    from custody.worker.signals import stopped_by_signals

    session = session_of(ctx)
    webhook = {"secret": secret or None, "refused": refused or (410,), "allow_networks": allow_network or ()}
    publishers = _publishers(publisher or (), webhook, named_only=named_only)
    with located(session) as url, logged(session):
        running = Relay(
            url,
            publishers,
            batch=batch,
            lease=lease,
            max_attempts=max_attempts,
            retry_for=retry_for,
            max_age=max_age,
            backoff=backoff,
            on_dead=on_dead,  # type: ignore[arg-type]  # it refuses another word itself
            concurrency=concurrency,
            poll=poll,
            name=name,
            built_in=not named_only,
            allow_networks=allow_network or (),
        )
        if not session.json:
            session.note(f"relaying as {running.name}; SIGTERM or Ctrl-C stops")
        with stopped_by_signals(running.stop):
            summary = running.drain() if drain else running.run()
    if session.json:
        session.emit({"relay": running.name, "summary": summary})
    session.say(
        f"stopped: {summary.published:,} published, {summary.moved:,} moved into topics, {summary.failed:,} failed, "
        f"{summary.dead:,} dead, {summary.released:,} given back, {summary.lost:,} lost"
    )


def _publishers(given: Iterable[str], webhook: dict[str, Any], *, named_only: bool) -> dict[str, Any]:
    """Publishers by name. Every webhook has the same settings, those of events' own addresses too."""
    from custody.relay import WebhookPublisher

    any_url = WebhookPublisher(**webhook)  # made in any case: it refuses a wrong setting
    found: dict[str, Any] = {} if named_only else {"http": any_url, "https": any_url}
    for text in given:
        name, _, made = text.partition("=")
        if not made:
            raise typer.BadParameter(f"{text!r} is not NAME=PUBLISHER, such as billing=https://example.org/hook")
        if made.startswith(("http://", "https://")):
            found[name] = WebhookPublisher(made, **webhook)
        elif ":" in made and not made.startswith("custody+"):
            found[name] = _own(made)
        else:
            found[name] = made
    return found


def _own(name: str) -> Any:
    """`module:Publisher` of yours: a publisher's class, an instance, or a function of an event."""
    from custody.relay import Publisher

    found = imported(name)
    if isinstance(found, type) and issubclass(found, Publisher):
        return found()
    if not isinstance(found, Publisher) and not callable(found):
        raise typer.BadParameter(f"{name} is a {type(found).__name__}, neither a publisher nor a function")
    return found
