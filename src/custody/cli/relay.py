"""`custody relay run`: publishes the events of an outbox until it is stopped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from custody.cli import arguments
from custody.cli.app_file import imported
from custody.cli.arguments import DURATION
from custody.cli.logs import Format, Level, LogFormat, LogLevel, logged
from custody.cli.monitor import LOOPBACK, STALLED, HealthPort, MetricsHost, MetricsPort, Ports, StalledAfter
from custody.cli.outbox import located
from custody.cli.session import session_of
from custody.model.policy import Backoff

app = typer.Typer(name="relay", no_args_is_help=True, help="Publishes the events of an outbox to their destinations.")


@app.callback()
def relay() -> None:
    """Publishes the events of an outbox to their destinations."""


@app.command()
def run(
    ctx: typer.Context,
    publisher: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PUBLISHER serves destinations NAME:…; =PUBLISHER events without a destination."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Most events of one claim.")] = 100,
    lease: Annotated[Any, typer.Option(help="Duration of a claim; it is renewed while needed.", **DURATION)] = "30s",
    max_attempts: Annotated[int, typer.Option(min=1, help="Attempts before an event is dead.")] = 10,
    retry_for: Annotated[
        Any,
        typer.Option(help="An event younger than this is retried, even after --max-attempts.", **DURATION),
    ] = "1d",
    max_age: Annotated[Any, typer.Option(help="An event older than this is dead.", **DURATION)] = None,
    backoff: Annotated[
        Backoff | None,
        typer.Option(parser=arguments.backoff, metavar="BACKOFF", help="exponential:1s:cap=5m:jitter=0.2"),
    ] = None,
    on_dead: Annotated[str, typer.Option(help="hold: a dead event blocks its key; release: it does not.")] = "release",
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1, help="Threads for one destination.")] = 8,
    poll: Annotated[Any, typer.Option(help="Time between two polls.", **DURATION)] = "200ms",
    named_only: Annotated[
        bool,
        typer.Option("--named-only", help="Serve only the destinations of --publisher, and no URLs of events."),
    ] = False,
    drain: Annotated[bool, typer.Option("--drain", help="End when nothing is left to publish.")] = False,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            envvar="CUSTODY_WEBHOOK_SECRET",
            help="Secret that signs webhooks (whsec_…). To rotate it, put two in the variable, separated by a space.",
        ),
    ] = None,
    refused: Annotated[
        list[int] | None,
        typer.Option(
            min=300, max=599, help="HTTP status of a webhook that makes the event dead at once (default: 410)."
        ),
    ] = None,
    allow_network: Annotated[
        list[str] | None,
        typer.Option(help="Private network that destinations may be in, such as 10.0.0.0/8. Public ones are allowed."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the relay in claimed_by (default: host:pid).")] = None,
    log_level: LogLevel = Level.WARNING,
    log_format: LogFormat = Format.TEXT,
    metrics_port: MetricsPort = None,
    health_port: HealthPort = None,
    metrics_host: MetricsHost = LOOPBACK,
    stalled_after: StalledAfter = STALLED,
) -> None:
    """Publish events. SIGTERM or Ctrl-C stops it: running publishes finish, other claimed events are released."""
    from custody.relay import Relay
    from custody.worker.signals import stopped_by_signals

    session = session_of(ctx)
    webhook = {"secret": secret or None, "refused": refused or (410,), "allow_networks": allow_network or ()}
    publishers = _publishers(publisher or (), webhook, named_only=named_only)
    with located(session) as url, logged(session, log_level, log_format):
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
        ports = Ports(metrics_port, health_port, metrics_host, stalled_after)

        def families() -> Any:
            from custody.monitoring.exposition import of_relay

            return of_relay(running)

        with (
            ports.opened(
                session,
                {running.name: running.vitals},
                families,
                ping=running.ping,
                stopping=lambda: running.stopping,
            ),
            stopped_by_signals(running.stop),
        ):
            if not session.json:
                session.note(f"relaying as {running.name}; SIGTERM or Ctrl-C stops")
            summary = running.drain() if drain else running.run()
    if session.json:
        session.emit({"relay": running.name, "summary": summary})
    session.say(
        f"stopped: {summary.published:,} published, {summary.moved:,} moved into topics, {summary.failed:,} failed, "
        f"{summary.dead:,} dead, {summary.released:,} released, {summary.lost:,} lost"
    )


def _publishers(given: Iterable[str], webhook: dict[str, Any], *, named_only: bool) -> dict[str, Any]:
    """Publishers by name. All webhooks have the same settings, also those for URLs that events name."""
    from custody.relay import WebhookPublisher

    any_url = WebhookPublisher(**webhook)  # always created, because it refuses an invalid setting
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
    """A user's `module:name`: a publisher class, an instance, or a function that takes an event."""
    from custody.relay import Publisher

    found = imported(name)
    if isinstance(found, type) and issubclass(found, Publisher):
        return found()
    if not isinstance(found, Publisher) and not callable(found):
        raise typer.BadParameter(f"{name} is a {type(found).__name__}, neither a publisher nor a function")
    return found
