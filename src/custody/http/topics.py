"""Topics: `/topics`."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from custody.errors import InvalidArgument
from custody.http.call import Call
from custody.http.operation import Table
from custody.model import Kept, Segment, Upkeep
from custody.plain import plain
from custody.wire.answers import InFlightOut
from custody.wire.queries import GroupQuery
from custody.wire.reports import JournalOut, TopicOut
from custody.wire.requests import JournalPatch, MaintainIn, TopicIn, TopicPatch

table = Table("topics")


@table.operation(
    "POST", "/topics", body=TopicIn, answer=TopicOut, status=201, example={"name": "orders", "partitions": 4}
)
async def create_topic(call: Call) -> object:
    """Make a topic.

    With `priorities` each partition is five in the log. `max_depth` caps what is not resolved, for each partition.
    """
    call.allow("admin")
    body: TopicIn = call.body
    call.allow("admin", body.name)
    made = await call.run(
        call.engine.create_topic,
        body.name,
        partitions=body.partitions,
        max_depth=body.max_depth,
        priorities=body.priorities,
        starvation_limit=body.starvation_limit,
        retention=None if body.retention is None else body.retention.value(),
    )
    return plain(made)


@table.operation("GET", "/topics", answer=list[TopicOut])
async def topics(call: Call) -> object:
    """All topics; with a key, those that it has a right to."""
    found = await call.run(call.engine.topics)
    return [plain(topic) for topic in found if any(call.caller.may(right, topic.name) for right in _ANY)]


_ANY: tuple[Any, ...] = ("produce", "consume", "admin")


@table.operation("GET", "/topics/{topic}", answer=TopicOut)
async def topic(call: Call) -> object:
    """One topic, with its offsets and the number of messages."""
    _allow_any(call)
    return plain(await call.run(call.engine.topic, call.topic))


def _allow_any(call: Call) -> None:
    if not any(call.caller.may(right, call.topic) for right in _ANY):
        call.allow("consume", call.topic)


@table.operation("PATCH", "/topics/{topic}", body=TopicPatch, answer=TopicOut, example={"retention": {"time": "7d"}})
async def change_topic(call: Call) -> object:
    """Change what is kept, or add partitions.

    Partitions can be added only while no group that is ordered by key has anything unresolved: keys would move.
    """
    call.allow("admin", call.topic)
    body: TopicPatch = call.body
    if body.partitions is UNSET and body.retention is UNSET:
        raise InvalidArgument("there is nothing to change", "Give partitions or retention.")
    keep = None if body.retention is UNSET or body.retention is None else body.retention.value()
    if body.partitions is UNSET:
        return plain(await call.run(call.engine.set_retention, call.topic, keep))
    if body.retention is UNSET:
        return plain(await call.run(call.engine.grow_topic, call.topic, partitions=body.partitions))
    return plain(await call.run(call.state.verbs.change_topic, call.topic, partitions=body.partitions, retention=keep))


@table.operation("DELETE", "/topics/{topic}", answer=None, status=204)
async def delete_topic(call: Call) -> object:
    """Remove a topic with its messages and groups, for good."""
    call.allow("admin", call.topic)
    await call.run(call.engine.delete_topic, call.topic)
    return None


@table.operation("GET", "/topics/{topic}/inflight", query=GroupQuery, answer=InFlightOut)
async def in_flight(call: Call) -> object:
    """What is in flight, for each partition: of all groups, or of one."""
    call.allow("consume", call.topic)
    return InFlightOut.of(call.topic, await call.run(call.engine.in_flight, call.topic, call.query.group))


@table.operation("GET", "/topics/{topic}/segments", answer=list[Segment])
async def segments(call: Call) -> object:
    """The segments of a topic, oldest first, and what holds the oldest one."""
    call.allow("consume", call.topic)
    return plain(await call.run(call.engine.segments, call.topic))


@table.operation("GET", "/topics/{topic}/kept", answer=Kept)
async def kept_aside(call: Call) -> object:
    """The events of dead letters that have outlived their segments."""
    call.allow("consume", call.topic)
    return plain(await call.run(call.engine.kept_aside, call.topic))


@table.operation("POST", "/maintain", body=MaintainIn, body_required=False, answer=list[Upkeep], example={})
async def maintain(call: Call) -> object:
    """End and drop segments that are due, and parts of the journal. The server does it by itself now and then."""
    call.allow("admin")
    body = call.body or MaintainIn()
    if body.topic is None:
        call.allow_everywhere("admin")
    else:
        call.allow("admin", body.topic)
    return plain(await call.run(call.engine.maintain, body.topic))


@table.operation("GET", "/journal", answer=JournalOut)
async def journal(call: Call) -> object:
    """What the journal keeps, and its parts."""
    call.allow_everywhere("admin")
    return plain(await call.run(call.engine.journal))


@table.operation("PATCH", "/journal", body=JournalPatch, answer=JournalOut, example={"time": "90d"})
async def change_journal(call: Call) -> object:
    """Set how far back the journal goes; without a field, to the beginning."""
    call.allow_everywhere("admin")
    await call.run(call.engine.set_journal_retention, time=call.body.time, size=call.body.size)
    return plain(await call.run(call.engine.journal))
