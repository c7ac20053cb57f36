"""Steps of declared verbs that are written by hand: rights that depend on more than the path, and what a server does in
addition to the call. Each runs between the check of rights and the answer."""

from __future__ import annotations

from typing import Any

from custody.http.call import Call
from custody.http.derived import ANY
from custody.model.entities import Delayed, Producer, Receipt, Replayed, Topic
from custody.model.insights import HandlingTime


async def topics(call: Call, _given: dict[str, Any]) -> list[Topic]:
    """Leaves out topics to which the key has no right."""
    found = await call.run(call.engine.topics)
    return [topic for topic in found if any(call.caller.may(right, topic.name) for right in ANY)]


async def resume(call: Call, given: dict[str, Any]) -> bool:
    """Also wakes long polls of the group at once."""
    changed = await call.run(call.engine.resume, **given)
    call.state.long_polls.wake(call.topic)
    return changed


async def receive_events(call: Call, given: dict[str, Any]) -> int:
    """Adds the API key to the source, so that another key may send the same ids."""
    if call.caller.name is not None:  # names of keys have no slash, so none can pass for another
        given["source"] = f"{call.caller.name}/{given['source']}"
    return await call.state.append(call.engine.receive_events, **given)


async def producer(call: Call, given: dict[str, Any]) -> Producer:
    """Needs the right on the topic of the last receipt too."""
    found = await call.state.read(call.engine.producer, **given)
    if found.last_receipt is not None:  # the receipt reveals the end of its topic
        call.allow("produce", found.last_receipt.topic)
    return found


async def ack_in_transaction(call: Call, given: dict[str, Any]) -> None:
    """Needs the right on the topic of the lease."""
    place = await call.state.place_of(given["lease_id"])
    call.allow("consume", *([] if place is None else [place[0]]))
    await call.state.quick(call.engine.transactions.ack, **given)


async def commit(call: Call, given: dict[str, Any]) -> list[Receipt | Delayed]:
    """Repeats of a commit run one at a time, and the published messages are counted."""
    async with call.state.threads.turn(given["transaction_id"]):
        receipts = await call.state.append(call.engine.transactions.commit, **given)
    call.state.metrics.published(receipts)
    return receipts


async def handling_times(call: Call, given: dict[str, Any]) -> list[HandlingTime]:
    """Leaves out groups of topics to which the key has no right."""
    if given["topic"] is not None:
        call.allow("consume", given["topic"])
    found = await call.run(call.engine.handling_times, **given)
    return [one for one in found if call.caller.may("consume", one.topic)]


async def replay(call: Call, given: dict[str, Any]) -> Replayed:
    """Needs rights on the topics that the body names, and on the topic that the dead letter came from."""
    call.allow("admin", given["dlq_topic"])
    if given["target_topic"] is not None:
        call.allow("produce", given["target_topic"])
    if call.caller.may_everywhere("admin"):
        return await call.run(call.engine.replay, **given)
    origin = await _allowed_origin(call, (given["dlq_topic"], given["partition"], given["offset"]))
    return await call.run(call.state.verbs.replay_from, origin, **given, actor=call.worker)


async def _allowed_origin(call: Call, place: tuple[str, int, int]) -> str:
    """The topic that a dead letter came from. The caller needs rights on it, because its dead message is resolved and
    it may be the target.

    The name of that topic is in the copy, written by whoever published it, so it grants no right by itself.
    """
    origin, replayed_to = await call.run(call.state.verbs.dead_letter_origin, *place)
    if origin is not None:
        call.allow("admin", origin)
        return origin
    assert replayed_to is not None  # otherwise the lookup was refused
    call.allow("produce", replayed_to)  # nothing changes, but the answer says where the message is
    return ""  # no topic has this name: if another copy appears meanwhile, the replay is refused


STEPS = {
    step.__name__: step
    for step in (
        topics,
        resume,
        receive_events,
        producer,
        ack_in_transaction,
        commit,
        handling_times,
        replay,
    )
}
"""The steps by the names of their operations."""
