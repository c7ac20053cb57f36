"""Receiving: leases messages of one partition, at once or when some arrive."""

from __future__ import annotations

import asyncio
import time

import msgspec

from custody import tracing
from custody.coalesced import Ack, Claim
from custody.errors import CustodyError, LeaseLost, Withheld, by_code
from custody.http.answer import Answer
from custody.http.call import Call
from custody.http.long_polls import Place
from custody.http.operation import Table
from custody.http.settling import ack_first
from custody.verbs.claim import Lease
from custody.wire.answers import WakeupOut
from custody.wire.messages import LeaseOut, MessageOut
from custody.wire.queries import ReceiveQuery, WakeupQuery
from custody.wire.settled import SettledOut

table = Table("messages")

_GONE = Answer(b"", 499)
_WITHHELD = {code: kind for code, kind in by_code().items() if issubclass(kind, Withheld)}


@table.operation("GET", "/messages/{topic}/{partition}", query=ReceiveQuery, answer=LeaseOut)
async def receive_from(call: Call) -> Answer:
    """Receive messages of one partition.

    They are leased until the deadline: acknowledge each, or it is delivered again. With `wait` the answer comes as soon
    as there are messages, or empty after that time. With `auto_ack` they are done when they are sent (at most once).
    With `ack` it first acks an earlier lease, at once and whatever it finds then: `settled` is what that did, or `lost`
    has the offsets that the earlier lease no longer held. A paused group is then an empty answer with the reason.
    """
    return await _receive(call, call.partition())


@table.operation("GET", "/messages/{topic}", query=ReceiveQuery, answer=LeaseOut)
async def receive(call: Call) -> Answer:
    """Receive messages of any partition that has some.

    Otherwise the same as the call with a partition.
    """
    return await _receive(call, None)


async def _receive(call: Call, partition: int | None) -> Answer:
    call.allow("consume", call.topic)
    query: ReceiveQuery = call.query
    acked = None if query.ack is None else await ack_first(call, query.ack)
    # a lease has no more messages than one request can settle
    most = min(query.max, call.state.settings.max_batch)
    claim = Claim(max_messages=most, visibility_timeout=query.visibility_timeout, worker=call.worker)
    wait = min(query.wait or 0.0, call.state.max_wait)
    place = Place(call.topic, query.group, partition, query.create)
    began = time.time_ns()
    if wait:
        task = asyncio.ensure_future(call.state.long_polls.receive(place, claim, wait))
        try:
            lease = await call.unless_gone(task)
        finally:
            task.cancel()
        if lease is None:  # the client has disconnected
            if task.done() and not task.cancelled() and task.exception() is None and task.result():
                await call.state.give_back(task.result())
            return _GONE
        if lease:
            await _require_still(call, lease)
    else:
        lease = await call.state.long_polls.receive(place, claim, 0)
        if lease and call.is_gone:  # its expiry would count as a failed delivery
            await call.state.give_back(lease)
            return _GONE
    if not lease and lease.reason in _WITHHELD and acked is None:
        raise _WITHHELD[lease.reason](lease.detail and f"{_said(lease.reason)}: {lease.detail}", _remedy(lease.reason))
    if lease:
        call.state.metrics.received(place.topic, place.group, lease)
        tracing.received(place.topic, place.group, lease.messages, began)
        if query.auto_ack:
            await _acked(call, lease)
    out = _lease_out(lease)
    if isinstance(acked, LeaseLost):
        out.lost = list(acked.lost)
    elif acked is not None:
        out.settled = SettledOut.of(acked)
    return Answer(msgspec.json.encode(out))


def _lease_out(lease: Lease) -> LeaseOut:
    if not lease:
        return LeaseOut(lease_id=None, deadline=None, messages=[], reason=lease.reason, detail=lease.detail)
    lease_id = lease.lease_id
    return LeaseOut(
        lease_id=lease_id,
        deadline=lease.deadline,
        messages=[MessageOut.of(message, f"{lease_id}:{message.offset}") for message in lease.messages],
    )


@table.operation("GET", "/topics/{topic}/wakeups", query=WakeupQuery, answer=WakeupOut)
async def wakeups(call: Call) -> object:
    """Wait until something is published in a topic, without receiving it.

    The answer comes as soon as something has been published, or may have been, since the given token.
    """
    call.allow("consume", call.topic)
    await call.state.read(call.engine.topic, call.topic)  # refuses a topic that does not exist
    query: WakeupQuery = call.query
    wait = min(query.wait or 0.0, call.state.max_wait)
    if wait:
        task = asyncio.ensure_future(call.state.wakeups.wait(call.topic, query.since, wait))
        try:
            await call.unless_gone(task)
        finally:
            task.cancel()
        await call.allow_still("consume", call.topic)
    token = call.state.wakeups.token(call.topic)
    return WakeupOut(token, token != query.since)


async def _require_still(call: Call, lease: Lease) -> None:
    """Gives a lease back if the key has lost its right while it waited."""
    try:
        await call.allow_still("consume", call.topic)
    except CustodyError:
        await call.state.give_back(lease)
        raise


async def _acked(call: Call, lease: Lease) -> None:
    """Acks messages before they are sent: if the answer is lost, so are they, and none is delivered twice."""
    (answer,) = await call.state.ack_together([Ack(lease_id=lease.lease_id, offsets=None, worker=call.worker)])
    if isinstance(answer, Exception):
        raise answer
    call.state.metrics.settled(lease.lease_id, "ack", answer.settled)


def _said(reason: str) -> str:
    return (_WITHHELD[reason].__doc__ or reason).strip().rstrip(".")


def _remedy(reason: str) -> str:
    if reason == "paused":
        return "Resume the group, and receive again."
    if reason == "breaker_open":
        return "The breaker probes with one message at intervals; receive again later."
    return "Settle messages in flight; those due for a retry can still be received."
