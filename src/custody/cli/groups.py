"""`custody groups`: list, create, describe, update, bind, delete."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, Literal, cast

import typer

from custody.cli import arguments, render
from custody.cli.arguments import Group, Topic, Yes
from custody.cli.door import Door, counted, door_of
from custody.model import Group as GroupFound
from custody.policy import Backoff, Policy
from custody.routing import Binding

app = typer.Typer(no_args_is_help=True, help="Groups: list, create, describe, update, bind, delete.")

POLICY = "The policy"
Ordering = Annotated[
    Literal["none", "key"] | None,
    typer.Option(help="key: messages of one key are handled in their order.", rich_help_panel=POLICY),
]
MaxAttempts = Annotated[
    int | None, typer.Option(min=1, help="Failures after which a message is dead.", rich_help_panel=POLICY)
]
BackoffGiven = Annotated[
    Backoff | None,
    typer.Option(
        parser=arguments.backoff,
        metavar="KIND[:INITIAL[:NAME=VALUE…]]",
        help="exponential:2s:cap=5m:multiplier=2:jitter=0.1, linear:1s or constant:500ms.",
        rich_help_panel=POLICY,
    ),
]
Visibility = Annotated[
    str | None,
    typer.Option(
        parser=arguments.duration, metavar="DURATION", help="How long a lease lasts: 30s.", rich_help_panel=POLICY
    ),
]
HandlerTimeout = Annotated[
    str | None,
    typer.Option(metavar="DURATION|none", help="How long a worker lets a handler run.", rich_help_panel=POLICY),
]
OnDead = Annotated[
    Literal["release", "hold"] | None,
    typer.Option(help="hold: the key of a dead message waits for you.", rich_help_panel=POLICY),
]
DeadLetter = Annotated[
    Literal["keep", "topic"] | None,
    typer.Option(help="topic: what dies also leaves a copy in TOPIC-dlq.", rich_help_panel=POLICY),
]
CapOf = typer.Option(parser=arguments.cap, metavar="N|none", rich_help_panel=POLICY)
MaxInFlight = Annotated[Any, CapOf]
MaxAckHoles = Annotated[Any, CapOf]
MaxParked = Annotated[Any, CapOf]
BreakerGiven = Annotated[
    str | None,
    typer.Option(
        metavar="on|off|RATE[:NAME=VALUE…]",
        help="0.5:min_outcomes=20:window=10s:probe_after=5s opens at a failure rate of 50 %.",
        rich_help_panel=POLICY,
    ),
]
Fairness = Annotated[
    Literal["none", "key", "tenant"] | None,
    typer.Option(help="Keys, or tenants, are served in turn. It needs --ordering key.", rich_help_panel=POLICY),
]
TenantSeparator = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="The tenant is the part of the key before it: else a colon.", rich_help_panel=POLICY
    ),
]

BINDINGS = "What it gets"
Bind = Annotated[
    list[Any] | None,
    typer.Option(
        parser=arguments.pattern,
        metavar="PATTERN",
        help="Messages with such a routing key: orders.*.created, orders.> (* is one segment, > the rest).",
        rich_help_panel=BINDINGS,
    ),
]
BindHeader = Annotated[
    list[Any] | None,
    typer.Option(
        parser=arguments.header,
        metavar="NAME=VALUE",
        help="Only messages with this header; with several, with all of them.",
        rich_help_panel=BINDINGS,
    ),
]


def _bindings(patterns: list[str] | None, headers: list[tuple[str, str]] | None) -> list[Binding]:
    """One for each pattern, all with the same conditions."""
    if not patterns:
        return [Binding(headers=dict(headers))] if headers else []
    return [Binding(pattern, headers=dict(headers or ())) for pattern in patterns]


def _given(ctx: typer.Context) -> dict[str, Any]:
    """What a command was given of a policy: its options have the names of the policy's fields."""
    names = [field.name for field in fields(Policy)]
    return {name: value for name, value in ctx.params.items() if name in names and value is not None}


def _policy(base: Policy, given: dict[str, Any]) -> Policy:
    """The base with what was given; `none` takes a cap or a time-out away."""
    changes = dict(given)
    if "breaker" in changes:
        changes["breaker"] = arguments.breaker(changes["breaker"])
    if changes.get("handler_timeout", "none") != "none":
        arguments.duration(changes["handler_timeout"])
    changes = {name: None if value == "none" and name != "ordering" else value for name, value in changes.items()}
    return replace(base, **changes)


@app.command("list")
def list_groups(ctx: typer.Context, topic: Topic) -> None:
    """The groups of a topic."""
    door = door_of(ctx)
    with door.connect() as c:
        groups = c.groups(topic)
    if door.json:
        door.emit(groups)
        return
    rows = [
        [
            group.name,
            "bare" if group.policy is None else f"ordering {group.policy.ordering}",
            None if group.policy is None else group.policy.max_attempts,
            None if group.policy is None else render.span(cast("Any", group.policy.visibility_timeout)),
            _bound(group),
            None if group.paused_at is None else group.paused_reason or "yes",
            group.created_at,
        ]
        for group in groups
    ]
    columns = ["group", "kind", "max attempts", "visibility", "bound to", "paused", "created"]
    door.table(columns, rows, empty=f"Topic {topic} has no groups.")


def _bound(group: GroupFound) -> str:
    return "; ".join(map(str, group.bindings)) or "everything"


def _show(door: Door, group: GroupFound) -> None:
    if door.json:
        door.emit(group)
        return
    door.facts(
        {
            "topic": group.topic,
            "group": group.name,
            "kind": "bare: only a cursor" if group.bare else "with a lifecycle",
            "bound to": _bound(group),
            "created": group.created_at,
            "paused": render.pause(group),
            **render.policy(group),
        }
    )


@app.command()
def create(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    start: Annotated[
        Any,
        typer.Option(
            parser=arguments.start, metavar="earliest|latest|OFFSET|TIME", help="The first message that it gets."
        ),
    ] = "earliest",
    bare: Annotated[bool, typer.Option("--bare", help="Only a cursor, without lifecycle or policy.")] = False,
    bind: Bind = None,
    bind_header: BindHeader = None,
    ordering: Ordering = None,
    max_attempts: MaxAttempts = None,
    backoff: BackoffGiven = None,
    visibility_timeout: Visibility = None,
    handler_timeout: HandlerTimeout = None,
    on_dead: OnDead = None,
    dead_letter: DeadLetter = None,
    max_in_flight: MaxInFlight = None,
    max_ack_holes: MaxAckHoles = None,
    max_parked: MaxParked = None,
    breaker: BreakerGiven = None,
    fairness: Fairness = None,
    tenant_separator: TenantSeparator = None,
) -> None:
    """Create a group. What is not given comes from custody.yaml, the environment and the defaults."""
    from custody import config

    door = door_of(ctx)
    given = _given(ctx)
    policy = _policy(config.load().policy, given) if given else None
    with door.connect() as c:
        made = c.create_group(
            topic, group, policy, start=start, bare=bare, bindings=_bindings(bind, bind_header) or None
        )
    if door.json:
        door.emit(made)
    door.say(f"created {'bare ' if bare else ''}group {group} on topic {topic}")


@app.command()
def describe(ctx: typer.Context, topic: Topic, group: Group) -> None:
    """One group and its policy."""
    door = door_of(ctx)
    with door.connect() as c:
        found = c.group(topic, group)
    _show(door, found)


@app.command()
def update(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    max_attempts: MaxAttempts = None,
    backoff: BackoffGiven = None,
    visibility_timeout: Visibility = None,
    handler_timeout: HandlerTimeout = None,
    on_dead: OnDead = None,
    dead_letter: DeadLetter = None,
    max_in_flight: MaxInFlight = None,
    max_ack_holes: MaxAckHoles = None,
    max_parked: MaxParked = None,
    breaker: BreakerGiven = None,
    fairness: Fairness = None,
    tenant_separator: TenantSeparator = None,
) -> None:
    """Change the policy of a group, from now on. What is not given stays; so does the ordering."""
    door = door_of(ctx)
    given = _given(ctx)
    if not given:
        raise typer.BadParameter("say what to change, for example --max-attempts 5")
    with door.connect() as c:
        before = c.group(topic, group).policy or Policy()  # a bare group is refused by the verb itself
        changed = c.update_group(topic, group, _policy(before, given))
    _show(door, changed)


@app.command("bind")
def bind_group(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    bind: Bind = None,
    bind_header: BindHeader = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="No bindings: every message again.", rich_help_panel=BINDINGS)
    ] = False,
) -> None:
    """Replace what a group gets, from where it stands; `custody rewind` lets it apply to the past."""
    door = door_of(ctx)
    bindings = _bindings(bind, bind_header)
    if bool(bindings) == everything:
        raise typer.BadParameter("give --bind or --bind-header, or --everything")
    with door.connect() as c:
        changed = c.bind(topic, group, bindings)
    _show(door, changed)


@app.command()
def delete(ctx: typer.Context, topic: Topic, group: Group, yes: Yes = False) -> None:
    """Delete a group and everything that is known of it; the messages stay in the log."""
    door = door_of(ctx)
    with door.connect() as c:
        depth = c.stats(topic, group).depth
        door.confirm(f"Delete group {group} of topic {topic}, with {counted(depth, 'unresolved message')}?", yes=yes)
        c.delete_group(topic, group)
    if door.json:
        door.emit({"deleted": group, "topic": topic, "unresolved": depth})
    door.say(f"deleted group {group} of topic {topic}")
