"""`custody topics`: list, create, describe, retain, grow, delete."""

from __future__ import annotations

from typing import Annotated

import typer

from custody.cli import render, upkeep
from custody.cli.arguments import Ensure
from custody.cli.call import Call
from custody.cli.derived import calls
from custody.cli.session import counted
from custody.engine import Custody
from custody.model.entities import Topic
from custody.model.lanes import LANES, priority_of
from custody.model.retention import Retention

app = typer.Typer(no_args_is_help=True, help="Topics: list, create, describe, retain, grow, delete.")

NAMED = {"name": "topic"}


@app.command("list")
@calls(Custody.topics)
def list_topics(call: Call[list[Topic]]) -> None:
    call.listing(
        call(),
        [
            ("topic", "name"),
            "partitions",
            ("messages", "message_count"),
            "max_depth",
            ("created", "created_at"),
            ("priorities", lambda topic: "yes" if topic.priorities else None),
        ],
        empty="There are no topics.",
    )


@app.command()
@calls(Custody.create_topic, names=NAMED)
def create(call: Call[Topic], name: str, ensure: Ensure = False) -> None:
    made = call.of("ensure_topic")() if ensure else call()
    lanes = f", {made.partitions} in the log: one for each priority" if made.priorities else ""
    asked = made.partitions // LANES if made.priorities else made.partitions
    call.show(made, f"{'there is' if ensure else 'created'} topic {name} with {counted(asked, 'partition')}{lanes}")


@app.command()
@calls(Custody.topic, names=NAMED)
def describe(call: Call[Topic], name: str) -> None:
    """Show a topic: partitions, groups, retention, segments, and the group that keeps the oldest segment."""
    session, found, c = call.session, call(), call.c
    groups, segments, kept = c.groups(name), c.segments(name), c.kept_aside(name)
    if session.json:
        session.emit({"topic": found, "groups": groups, "segments": segments, "kept_dead_letters": kept})
        return
    limit = {"priorities": f"yes, starvation limit {render.span(found.starvation_limit)}"}
    session.facts(
        {
            "topic": found.name,
            "created": found.created_at,
            "max depth": found.max_depth,
            **(limit if found.priorities else {}),
            "messages": found.message_count,
            "groups": ", ".join(group.name for group in groups) or None,
            "retention": upkeep.described(found.retention),
            "size": render.size(sum(segment.bytes for segment in segments)),
            "kept dead letters": kept.events,
        }
    )
    bounds = enumerate(zip(found.first_offsets, found.tails, strict=True))
    lane = ["priority"] if found.priorities else []
    rows = [
        [partition, *(priority_of(partition) for _ in lane), first, tail, tail - first]
        for partition, (first, tail) in bounds
    ]
    session.table(["partition", *lane, "first offset", "next offset", "messages"], rows, empty="")
    upkeep.show_segments(session, segments)


@app.command()
@calls(Custody.set_retention)
def retain(
    call: Call[Topic],
    topic: str,
    retention: Retention | None,
    everything: Annotated[bool, typer.Option("--everything", help="Keep everything from now on.")] = False,
) -> None:
    """Set the retention of a topic, by time and size. Whole segments are dropped, oldest first."""
    if everything == (retention is not None):
        raise typer.BadParameter("give --retention-time or --retention-size, or --everything")
    found = call(retention=retention)
    call.show(found, f"topic {topic}: {upkeep.described(found.retention)}")


@app.command()
@calls(Custody.grow_topic, arguments=["partitions"])
def grow(call: Call[Topic], topic: str) -> None:
    found = call()
    call.show(found, f"topic {topic} has {counted(found.partitions, 'partition')}")


@app.command()
@calls(Custody.delete_topic, names=NAMED, confirms=True)
def delete(call: Call[None], name: str) -> None:
    found = call.c.topic(name)
    contents = f"{counted(found.message_count, 'message')} and {counted(len(call.c.groups(name)), 'group')}"
    call.confirm(f"Delete topic {name} with {contents}?")
    call()
    call.show({"deleted": name, "messages": found.message_count}, f"deleted topic {name} with {contents}")
