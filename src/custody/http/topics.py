"""Topics: `/topics`."""

from __future__ import annotations

from msgspec import UNSET

from custody.errors import InvalidArgument
from custody.http.call import Call
from custody.http.derived import ANY, by_hand
from custody.http.operation import Table
from custody.model.plain import plain
from custody.wire.reports import JournalOut, TopicOut
from custody.wire.requests import JournalPatch, TopicIn, TopicPatch

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


@by_hand
async def topics(call: Call) -> object:
    """Topics to which the key has no right are left out."""
    found = await call.run(call.engine.topics)
    return [plain(topic) for topic in found if any(call.caller.may(right, topic.name) for right in ANY)]


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


@by_hand
async def maintain(call: Call) -> object:
    """It needs the right on the topic that the body names, or on all."""
    call.allow("admin")
    topic = None if call.body is None else call.body.topic
    if topic is None:
        call.allow_everywhere("admin")
    else:
        call.allow("admin", topic)
    return plain(await call.run(call.engine.maintain, topic))


@table.operation("PATCH", "/journal", body=JournalPatch, answer=JournalOut, example={"time": "90d"})
async def change_journal(call: Call) -> object:
    """Set how far back the journal goes; without a field, to the beginning."""
    call.allow_everywhere("admin")
    await call.run(call.engine.set_journal_retention, time=call.body.time, size=call.body.size)
    return plain(await call.run(call.engine.journal))
