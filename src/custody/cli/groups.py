"""`custody groups`: list, create, describe, update, bind, delete."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, cast

import typer
from msgspec import UNSET

from custody.cli import arguments, render
from custody.cli.arguments import Ensure, Group, Topic, Yes
from custody.cli.session import Session, counted, session_of
from custody.cli.settings import options
from custody.model.entities import Group as GroupFound
from custody.model.policy import Policy
from custody.model.routing import Binding

app = typer.Typer(no_args_is_help=True, help="Groups: list, create, describe, update, bind, delete.")

POLICY = "The policy"
BINDINGS = "Bindings"
Bind = Annotated[
    list[Any] | None,
    typer.Option(
        parser=arguments.pattern,
        metavar="PATTERN",
        help="Receive messages whose routing key matches: orders.*.created, orders.> (* is one segment, > the rest).",
        rich_help_panel=BINDINGS,
    ),
]
BindHeader = Annotated[
    list[Any] | None,
    typer.Option(
        parser=arguments.header,
        metavar="NAME=VALUE",
        help="Receive only messages with this header; if repeated, with all of them.",
        rich_help_panel=BINDINGS,
    ),
]


def _bindings(patterns: list[str] | None, headers: list[tuple[str, str]] | None) -> list[Binding]:
    """One for each pattern, all with the same headers."""
    if not patterns:
        return [Binding(headers=dict(headers))] if headers else []
    return [Binding(pattern, headers=dict(headers or ())) for pattern in patterns]


@app.command("list")
def list_groups(ctx: typer.Context, topic: Topic) -> None:
    """List the groups of a topic."""
    session = session_of(ctx)
    with session.connect() as c:
        groups = c.groups(topic)
    if session.json:
        session.emit(groups)
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
    session.table(columns, rows, empty=f"Topic {topic} has no groups.")


def _bound(group: GroupFound) -> str:
    return "; ".join(map(str, group.bindings)) or "everything"


def _show(session: Session, group: GroupFound) -> None:
    if session.json:
        session.emit(group)
        return
    session.facts(
        {
            "topic": group.topic,
            "group": group.name,
            "kind": "bare: only offsets" if group.bare else "with a lifecycle",
            "bound to": _bound(group),
            "created": group.created_at,
            "paused": render.pause(group),
            **render.policy(group),
        }
    )


@app.command()
@options(Policy, panel=POLICY)
def create(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    start: Annotated[
        Any,
        typer.Option(
            parser=arguments.start, metavar="earliest|latest|OFFSET|TIME", help="First message that it receives."
        ),
    ] = "earliest",
    bare: Annotated[bool, typer.Option("--bare", help="Only committed offsets: no lifecycle, no policy.")] = False,
    bind: Bind = None,
    bind_header: BindHeader = None,
    ensure: Ensure = False,
    *,
    given: dict[str, Any],
) -> None:
    """Create a group. Defaults of the policy come from custody.yaml and the environment."""
    from custody import config

    session = session_of(ctx)
    policy = replace(config.load().policy, **given) if given else None
    with session.connect() as c:
        bindings = _bindings(bind, bind_header)
        if ensure:
            made = c.ensure_group(topic, group, policy, start=start, bare=bare or None, bindings=bindings or UNSET)
        else:
            made = c.create_group(topic, group, policy, start=start, bare=bare, bindings=bindings or None)
    if session.json:
        session.emit(made)
    session.say(f"{'there is' if ensure else 'created'} {'bare ' if bare else ''}group {group} on topic {topic}")


@app.command()
def describe(ctx: typer.Context, topic: Topic, group: Group) -> None:
    """Show a group and its policy."""
    session = session_of(ctx)
    with session.connect() as c:
        found = c.group(topic, group)
    _show(session, found)


@app.command()
@options(Policy, panel=POLICY, without=("ordering",))
def update(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    *,
    given: dict[str, Any],
) -> None:
    """Change the given settings of a group's policy, from now on. The ordering cannot be changed."""
    session = session_of(ctx)
    if not given:
        raise typer.BadParameter("give a setting to change, for example --max-attempts 5")
    with session.connect() as c:
        changed = c.change_group(topic, group, policy=given)
    _show(session, changed)


@app.command("bind")
def bind_group(
    ctx: typer.Context,
    topic: Topic,
    group: Group,
    bind: Bind = None,
    bind_header: BindHeader = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Remove the bindings: receive every message.", rich_help_panel=BINDINGS)
    ] = False,
) -> None:
    """Replace the bindings of a group, from its position on. To apply them to older messages, use `custody rewind`."""
    session = session_of(ctx)
    bindings = _bindings(bind, bind_header)
    if bool(bindings) == everything:
        raise typer.BadParameter("give --bind or --bind-header, or --everything")
    with session.connect() as c:
        changed = c.bind(topic, group, bindings)
    _show(session, changed)


@app.command()
def delete(ctx: typer.Context, topic: Topic, group: Group, yes: Yes = False) -> None:
    """Delete a group and its state. The messages stay in the log."""
    session = session_of(ctx)
    with session.connect() as c:
        depth = c.stats(topic, group).depth
        session.confirm(f"Delete group {group} of topic {topic}, with {counted(depth, 'unresolved message')}?", yes=yes)
        c.delete_group(topic, group)
    if session.json:
        session.emit({"deleted": group, "topic": topic, "unresolved": depth})
    session.say(f"deleted group {group} of topic {topic}")
