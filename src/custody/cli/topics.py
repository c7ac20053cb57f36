"""`custody topics`: list, create, describe, retain, grow, delete."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from custody.cli import render, upkeep
from custody.cli.arguments import DURATION, Ensure, Topic, Yes
from custody.cli.session import counted, session_of
from custody.model.lanes import LANES, priority_of

app = typer.Typer(no_args_is_help=True, help="Topics: list, create, describe, retain, grow, delete.")


@app.command("list")
def list_topics(ctx: typer.Context) -> None:
    """List all topics."""
    session = session_of(ctx)
    with session.connect() as c:
        topics = c.topics()
    if session.json:
        session.emit(topics)
        return
    rows = [
        [
            topic.name,
            topic.partitions,
            topic.message_count,
            topic.max_depth,
            topic.created_at,
            "yes" if topic.priorities else None,
        ]
        for topic in topics
    ]
    columns = ["topic", "partitions", "messages", "max depth", "created", "priorities"]
    session.table(columns, rows, empty="There are no topics.")


@app.command()
@upkeep.retention_options
def create(
    ctx: typer.Context,
    topic: Topic,
    partitions: Annotated[
        int | None, typer.Option("--partitions", "-p", min=1, help="Number of partitions (default: 1).")
    ] = None,
    max_depth: Annotated[
        int | None, typer.Option(min=1, help="Refuse publishes while a partition has this many unresolved messages.")
    ] = None,
    priorities: Annotated[
        bool, typer.Option("--priorities", help="Five priorities, served by weight. The log has a partition for each.")
    ] = False,
    starvation_limit: Annotated[
        str | None,
        typer.Option(help="With --priorities: messages that wait longer come first (default: 1m).", **DURATION),
    ] = None,
    ensure: Ensure = False,
    *,
    given: dict[str, Any],
) -> None:
    """Create a topic."""
    session = session_of(ctx)
    retention = upkeep.retention_of(given)
    with session.connect() as c:
        settings: dict[str, Any] = {
            "max_depth": max_depth,
            "starvation_limit": starvation_limit,
            "retention": retention,
        }
        if ensure:
            made = c.ensure_topic(topic, partitions=partitions, priorities=priorities or None, **settings)
        else:
            made = c.create_topic(topic, partitions=partitions or 1, priorities=priorities, **settings)
    if session.json:
        session.emit(made)
    lanes = f", {made.partitions} in the log: one for each priority" if made.priorities else ""
    asked = made.partitions // LANES if made.priorities else made.partitions
    session.say(f"{'there is' if ensure else 'created'} topic {topic} with {counted(asked, 'partition')}{lanes}")


@app.command()
def describe(ctx: typer.Context, topic: Topic) -> None:
    """Show a topic: partitions, groups, retention, segments, and the group that keeps the oldest segment."""
    session = session_of(ctx)
    with session.connect() as c:
        found = c.topic(topic)
        groups = c.groups(topic)
        segments = c.segments(topic)
        kept = c.kept_aside(topic)
    if session.json:
        session.emit({"topic": found, "groups": groups, "segments": segments, "kept_dead_letters": kept})
        return
    session.facts(
        {
            "topic": found.name,
            "created": found.created_at,
            "max depth": found.max_depth,
            **(
                {"priorities": f"yes, starvation limit {render.span(found.starvation_limit)}"}
                if found.priorities
                else {}
            ),
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
@upkeep.retention_options
def retain(
    ctx: typer.Context,
    topic: Topic,
    everything: Annotated[bool, typer.Option("--everything", help="Keep everything from now on.")] = False,
    *,
    given: dict[str, Any],
) -> None:
    """Set the retention of a topic, by time and size. Whole segments are dropped, oldest first."""
    session = session_of(ctx)
    retention = upkeep.retention_of(given)
    if everything == (retention is not None):
        raise typer.BadParameter("give --retention-time or --retention-size, or --everything")
    with session.connect() as c:
        found = c.set_retention(topic, retention)
    if session.json:
        session.emit(found)
    session.say(f"topic {topic}: {upkeep.described(found.retention)}")


@app.command()
def grow(
    ctx: typer.Context,
    topic: Topic,
    partitions: Annotated[int, typer.Argument(min=1, help="New number of partitions.")],
) -> None:
    """Add partitions to a topic. Refused while a group with ordering by key has unresolved messages."""
    session = session_of(ctx)
    with session.connect() as c:
        found = c.grow_topic(topic, partitions=partitions)
    if session.json:
        session.emit(found)
    session.say(f"topic {topic} has {counted(found.partitions, 'partition')}")


@app.command()
def delete(ctx: typer.Context, topic: Topic, yes: Yes = False) -> None:
    """Delete a topic with its messages and groups. This cannot be undone."""
    session = session_of(ctx)
    with session.connect() as c:
        found = c.topic(topic)
        groups = counted(len(c.groups(topic)), "group")
        session.confirm(f"Delete topic {topic} with {counted(found.message_count, 'message')} and {groups}?", yes=yes)
        c.delete_topic(topic)
    if session.json:
        session.emit({"deleted": topic, "messages": found.message_count})
    session.say(f"deleted topic {topic} with {counted(found.message_count, 'message')} and {groups}")
