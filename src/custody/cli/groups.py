"""`custody groups`: list, create, describe, update, bind, delete."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from custody.cli import completion, render
from custody.cli.arguments import Ensure
from custody.cli.call import Call
from custody.cli.composite import BINDINGS
from custody.cli.derived import calls
from custody.cli.session import Session, counted
from custody.engine import Custody
from custody.model.entities import Group

app = typer.Typer(no_args_is_help=True, help="Groups: list, create, describe, update, bind, delete.")


@app.command("list")
@calls(Custody.all_groups)
def list_groups(
    call: Call[list[Group]],
    topic: Annotated[
        str | None, typer.Argument(help="The topic. Default: all.", autocompletion=completion.topics)
    ] = None,
) -> None:
    """List the groups of a topic, or of all topics."""
    call.listing(
        call() if topic is None else call.c.groups(topic),
        [
            *([("topic", "topic")] if topic is None else []),
            ("group", "name"),
            ("kind", lambda group: f"ordering {group.policy.ordering}" if group.policy else "bare"),
            ("max attempts", lambda group: group.policy and group.policy.max_attempts),
            ("visibility", lambda group: group.policy and render.span(group.policy.visibility_timeout)),
            ("bound to", _bound),
            ("paused", lambda group: None if group.paused_at is None else group.paused_reason or "yes"),
            ("created", "created_at"),
        ],
        empty="There are no groups." if topic is None else f"Topic {topic} has no groups.",
    )


def _bound(group: Group) -> str:
    return "; ".join(map(str, group.bindings)) or "everything"


def _show(session: Session, group: Group) -> None:
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
@calls(Custody.create_group)
def create(call: Call[Group], topic: str, group: str, bare: bool, ensure: Ensure = False) -> None:
    """Create a group. Defaults of the policy come from custody.yaml and the environment."""
    made = call.of("ensure_group")() if ensure else call()
    done = "there is" if ensure else "created"
    call.show(made, f"{done} {'bare ' if bare else ''}group {group} on topic {topic}")


@app.command()
@calls(Custody.group)
def describe(call: Call[Group]) -> None:
    _show(call.session, call())


@app.command()
@calls(Custody.change_group, without=["bindings"])
def update(call: Call[Group]) -> None:
    """Change the given settings of a group's policy, from now on. The ordering cannot be changed."""
    if "policy" not in call.given:
        raise typer.BadParameter("give a setting to change, for example --max-attempts 5")
    _show(call.session, call())


@app.command("bind")
@calls(Custody.bind)
def bind_group(
    call: Call[Group],
    bindings: Any,
    everything: Annotated[
        bool, typer.Option("--everything", help="Remove the bindings: receive every message.", rich_help_panel=BINDINGS)
    ] = False,
) -> None:
    """Replace the bindings of a group, from its position on. To apply them to older messages, use `custody rewind`."""
    if bool(bindings) == everything:
        raise typer.BadParameter("give --bind or --bind-header, or --everything")
    _show(call.session, call(bindings=bindings))


@app.command()
@calls(Custody.delete_group, confirms=True)
def delete(call: Call[None], topic: str, group: str) -> None:
    depth = call.c.stats(topic, group).depth
    call.confirm(f"Delete group {group} of topic {topic}, with {counted(depth, 'unresolved message')}?")
    call()
    call.show({"deleted": group, "topic": topic, "unresolved": depth}, f"deleted group {group} of topic {topic}")
