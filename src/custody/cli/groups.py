"""`custody groups`: list, create, describe, update, bind, delete."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, cast

import typer

from custody.cli import arguments, render
from custody.cli.arguments import Group, Topic, Yes
from custody.cli.session import Session, counted, session_of
from custody.cli.settings import options
from custody.model.entities import Group as GroupFound
from custody.model.policy import Policy
from custody.model.routing import Binding

app = typer.Typer(no_args_is_help=True, help="Groups: list, create, describe, update, bind, delete.")

POLICY = "The policy"
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


@app.command("list")
def list_groups(ctx: typer.Context, topic: Topic) -> None:
    """The groups of a topic."""
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
            "kind": "bare: only a cursor" if group.bare else "with a lifecycle",
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
            parser=arguments.start, metavar="earliest|latest|OFFSET|TIME", help="The first message that it gets."
        ),
    ] = "earliest",
    bare: Annotated[bool, typer.Option("--bare", help="Only a cursor, without lifecycle or policy.")] = False,
    bind: Bind = None,
    bind_header: BindHeader = None,
    *,
    given: dict[str, Any],
) -> None:
    """Create a group. What is not given comes from custody.yaml, the environment and the defaults."""
    from custody import config

    session = session_of(ctx)
    policy = replace(config.load().policy, **given) if given else None
    with session.connect() as c:
        made = c.create_group(
            topic, group, policy, start=start, bare=bare, bindings=_bindings(bind, bind_header) or None
        )
    if session.json:
        session.emit(made)
    session.say(f"created {'bare ' if bare else ''}group {group} on topic {topic}")


@app.command()
def describe(ctx: typer.Context, topic: Topic, group: Group) -> None:
    """One group and its policy."""
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
    """Change the policy of a group, from now on. What is not given stays; so does the ordering."""
    session = session_of(ctx)
    if not given:
        raise typer.BadParameter("say what to change, for example --max-attempts 5")
    with session.connect() as c:
        before = c.group(topic, group).policy or Policy()  # a bare group is refused by the verb itself
        changed = c.update_group(topic, group, replace(before, **given))
    _show(session, changed)


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
    session = session_of(ctx)
    bindings = _bindings(bind, bind_header)
    if bool(bindings) == everything:
        raise typer.BadParameter("give --bind or --bind-header, or --everything")
    with session.connect() as c:
        changed = c.bind(topic, group, bindings)
    _show(session, changed)


@app.command()
def delete(ctx: typer.Context, topic: Topic, group: Group, yes: Yes = False) -> None:
    """Delete a group and everything that is known of it; the messages stay in the log."""
    session = session_of(ctx)
    with session.connect() as c:
        depth = c.stats(topic, group).depth
        session.confirm(f"Delete group {group} of topic {topic}, with {counted(depth, 'unresolved message')}?", yes=yes)
        c.delete_group(topic, group)
    if session.json:
        session.emit({"deleted": group, "topic": topic, "unresolved": depth})
    session.say(f"deleted group {group} of topic {topic}")
