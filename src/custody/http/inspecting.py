"""What happened to a message, and how the server and its database are."""

from __future__ import annotations

import asyncio

import msgspec

from custody.errors import ServerStopping
from custody.http.answer import Answer
from custody.http.call import Call
from custody.http.metrics import CONTENT_TYPE
from custody.http.operation import Table
from custody.insights import Server
from custody.model import HistoryEntry, Replayed
from custody.plain import plain
from custody.wire.answers import HealthOut
from custody.wire.queries import GroupQuery, TopicGroupQuery
from custody.wire.reports import HandlingOut
from custody.wire.requests import ReplayIn

table = Table("operating")


@table.operation(
    "GET",
    "/topics/{topic}/partitions/{partition}/messages/{offset}/history",
    query=GroupQuery,
    answer=list[HistoryEntry],
)
async def trace(call: Call) -> object:
    """Everything that happened to one message, oldest first."""
    call.allow("consume", call.topic)
    return plain(
        await call.run(call.engine.trace, call.topic, call.partition(), call.number("offset"), group=call.query.group)
    )


@table.operation(
    "POST",
    "/messages/dlq/replay",
    body=ReplayIn,
    answer=Replayed,
    example={"dlq_topic": "orders-dlq", "partition": 0, "offset": 5, "target_topic": "orders"},
)
async def replay(call: Call) -> object:
    """Publish a dead letter again, to its own topic or another one, once. A repeat returns the first receipt."""
    call.allow("admin")
    body: ReplayIn = call.body
    call.allow("admin", body.dlq_topic)
    if body.target_topic is not None:
        call.allow("produce", body.target_topic)
    place = (body.dlq_topic, body.partition, body.offset)
    if call.caller.may_everywhere("admin"):
        return await call.run(call.engine.replay, *place, target_topic=body.target_topic, reason=body.reason)
    return await call.run(
        call.state.verbs.replay_from,
        await _allowed_origin(call, place),
        *place,
        target_topic=body.target_topic,
        actor=call.worker,
        reason=body.reason,
    )


async def _allowed_origin(call: Call, place: tuple[str, int, int]) -> str:
    """The topic that a copy names as its own is changed too: its dead message is resolved, and it may be the target.

    Whoever could publish the copy wrote that name, so it gives no right by itself.
    """
    origin, replayed_to = await call.run(call.state.verbs.dead_letter_origin, *place)
    if origin is not None:
        call.allow("admin", origin)
        return origin
    assert replayed_to is not None  # else it was refused
    call.allow("produce", replayed_to)  # nothing will be changed, and the answer tells where the message is
    return ""  # no topic: should there be another copy by now, it is refused


@table.operation("GET", "/handling-times", query=TopicGroupQuery, answer=list[HandlingOut])
async def handling_times(call: Call) -> object:
    """How long recent leases took, for each group: what a visibility timeout has to cover."""
    query: TopicGroupQuery = call.query
    call.allow("consume", *([] if query.topic is None else [query.topic]))
    found = await call.run(call.engine.handling_times, query.topic, query.group)
    return [
        {**plain(one), "recommended_visibility_timeout": one.recommended}
        for one in found
        if call.caller.may("consume", one.topic)
    ]


@table.operation("GET", "/server", answer=Server)
async def server(call: Call) -> object:
    """The database server: its version, what durability rests on, transactions that are open for long."""
    call.allow_everywhere("admin")
    return plain(await call.run(call.engine.server))


@table.operation("GET", "/healthz", answer=HealthOut, open=True)
async def healthz(_call: Call) -> Answer:
    """The server runs."""
    return Answer(msgspec.json.encode(HealthOut("ok")))


@table.operation("GET", "/readyz", answer=HealthOut, open=True)
async def readyz(call: Call) -> Answer:
    """The server can do its work: its database answers, and it is not about to stop."""
    if call.state.stopping:
        raise ServerStopping(remedy="Use another one.")
    await call.state.ping()
    return Answer(msgspec.json.encode(HealthOut("ready")))


@table.operation("GET", "/metrics", answer=str, media_type="text/plain")
async def metrics(call: Call) -> Answer:
    """What the server has counted, and the figures of all groups, for Prometheus.

    `custody_up` is 0 if the database does not answer; what the server knows of itself is there all the same.
    """
    overview = await call.state.scraping.overview()
    # in a thread: with hundreds of groups it is work of some milliseconds
    return Answer(await asyncio.to_thread(call.state.metrics.exposition, overview), content_type=CONTENT_TYPE)
