"""What happened to a message, and how the server and its database are."""

from __future__ import annotations

import asyncio

import msgspec

from custody.errors import ServerStopping
from custody.http.answer import Answer
from custody.http.call import Call
from custody.http.derived import by_hand
from custody.http.metrics import CONTENT_TYPE
from custody.http.operation import Table
from custody.wire.answers import HealthOut
from custody.wire.reports import HandlingOut

table = Table("operating")


@by_hand
async def replay(call: Call) -> object:
    """It needs rights on the topics that the body names, and on the one that the copy came from."""
    call.allow("admin")
    body = call.body
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


@by_hand
async def handling_times(call: Call) -> object:
    """Groups of topics to which the key has no right are left out."""
    query = call.query
    call.allow("consume", *([] if query.topic is None else [query.topic]))
    found = await call.run(call.engine.handling_times, query.topic, query.group)
    return [HandlingOut.of(one) for one in found if call.caller.may("consume", one.topic)]


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
