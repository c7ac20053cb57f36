"""Settling: ack, nack, release, later, extend. Each is fenced by the lease, or by a receipt, which names it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import msgspec

from custody.coalesced import Ack
from custody.errors import CustodyError, InvalidArgument, LeaseLost
from custody.http.answer import Answer
from custody.http.call import Call, lease_of_receipt
from custody.http.operation import Table
from custody.model.entities import DEFAULT_GROUP, Settled
from custody.model.outcomes import Kind, Outcome
from custody.verbs.settle import REMEDY
from custody.wire.answers import DeadlineOut, SettledOut
from custody.wire.requests import AckIn, ExtendIn, LaterIn, MessageRef, NackIn, SettleIn

table = Table("messages")

_EXAMPLE = {"topic": "orders", "partition": 0, "offset": 42, "receipt": "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e:42"}
encode = msgspec.json.encode


@table.operation("POST", "/messages/ack", body=AckIn, answer=SettledOut, example=_EXAMPLE)
async def ack(call: Call) -> Answer:
    """Messages are done.

    One by its receipt, several of a lease by their offsets, all of a lease, or any as `messages`: one request, one
    commit. What the lease has lost is `lease_lost`, and the rest is done. What the same lease has acknowledged before
    is a success, with `already`.
    """
    call.allow("consume")
    wanted = _acks(call, call.body)
    await _allow(call, wanted)
    if len(wanted) == 1:
        settled = await call.state.acks.submit(wanted[0])
        _count(call, wanted[0], settled)
        return Answer(encode(SettledOut.of(settled)))
    answers = await call.state.settle_together(wanted)
    for answer, one in zip(answers, wanted, strict=True):
        if isinstance(answer, Settled):
            _count(call, one, answer)
    return Answer(encode(SettledOut.of(*_all_good(answers, wanted))))


def _count(call: Call, one: Ack, settled: Settled) -> None:
    metrics = call.state.metrics
    if settled.already:
        return  # counted when it was done
    if one.lease_id is not None:
        metrics.settled(one.lease_id, "ack", settled.settled)
    elif one.topic is not None:
        metrics.settled_in(one.topic, one.group or DEFAULT_GROUP, "ack", settled.settled)


def _acks(call: Call, body: AckIn) -> list[Ack]:
    if body.messages is None:
        call.require_batch(len(body.offsets or ()))
        return [_one(call, body, body.offsets)]
    if body.offsets is not None or body.offset is not None or body.receipt is not None:
        raise InvalidArgument("messages are named in one way: as `messages`, as `offsets`, or by themselves")
    if not body.messages:
        raise InvalidArgument("`messages` is empty", "Name the messages.", path="$.messages")
    call.require_batch(len(body.messages))
    every = [
        _one(call, message if message.lease_id or body.lease_id is None else _of_lease(message, body), None)
        for message in body.messages
    ]
    # several of a lease are settled as one: in an ordered group an earlier one of a key has to come with a later one
    joined: dict[tuple[UUID | None, str | None, int | None, object], Ack] = {}
    for number, one in enumerate(every):
        key = (one.lease_id, one.topic, one.partition, number if one.lease_id is None else None)
        before = joined.get(key)
        if before is None or before.offsets is None:
            joined[key] = before or one
        elif one.offsets is None:
            joined[key] = one
        else:
            joined[key] = replace(before, offsets=[*before.offsets, *one.offsets])
    return list(joined.values())


def _of_lease(message: MessageRef, body: AckIn) -> MessageRef:
    return msgspec.structs.replace(message, lease_id=body.lease_id)


def _one(call: Call, ref: MessageRef, offsets: Sequence[int] | None) -> Ack:
    """What one reference means."""
    lease_id, offset = ref.lease_id, ref.offset
    if ref.receipt is not None:
        lease_id, named = lease_of_receipt(ref.receipt)
        if offset not in (None, named) or ref.lease_id not in (None, lease_id):
            raise InvalidArgument("the receipt is of another message than the one that is named with it")
        offset = named
    if offset is not None:
        if offsets is not None:
            raise InvalidArgument("give `offset` or `offsets`, not both")
        offsets = [offset]
    if lease_id is None and (ref.topic is None or ref.partition is None or offset is None):
        raise InvalidArgument(
            "which message?", "Give its receipt, or the lease_id, or its topic, partition and offset."
        )
    if offsets is not None and not offsets:
        raise InvalidArgument(
            "`offsets` is empty",
            "Name offsets, or leave it out for all of the lease that are not settled.",
            path="$.offsets",
        )
    return Ack(
        lease_id=lease_id,
        offsets=offsets,
        topic=ref.topic,
        group=ref.group,
        partition=ref.partition,
        worker=call.worker,
    )


async def _allow(call: Call, wanted: Sequence[Ack]) -> None:
    """Refuses if the key has no right to consume one of the topics; where only a lease is named, it tells which."""
    if call.caller.may_everywhere("consume"):
        return
    for one in wanted:
        if one.topic is not None:  # a lease of another topic than the one named with it settles nothing
            call.allow("consume", one.topic)
            continue
        assert one.lease_id is not None
        place = await call.state.place_of(one.lease_id)
        call.allow("consume", *([] if place is None else [place[0]]))  # no place: it holds nothing to be changed


def _all_good(answers: Sequence[Settled | CustodyError], wanted: Sequence[Ack]) -> list[Settled]:
    """Raises the first error that is not a lost lease, or one for all that was lost."""
    lost: list[int] = []
    for answer, one in zip(answers, wanted, strict=True):
        if isinstance(answer, LeaseLost):
            lost += answer.lost or one.offsets or ()
        elif isinstance(answer, CustodyError):
            raise answer
    if any(isinstance(answer, LeaseLost) for answer in answers):
        raise _some_lost(lost)
    return [answer for answer in answers if isinstance(answer, Settled)]


def _some_lost(offsets: Sequence[int]) -> LeaseLost:
    return LeaseLost("some of the messages are not held any more; the others are settled", REMEDY, lost=offsets)


@dataclass(frozen=True, kw_only=True)
class _Held:
    """A lease and the offsets of it that are meant; None means all."""

    lease_id: UUID
    offsets: list[int] | None


def _resolved(call: Call, one: Ack) -> _Held:
    """The lease that is named, checked to be where the request says."""
    offsets = None if one.offsets is None else list(dict.fromkeys(one.offsets))
    lease_id = one.lease_id
    if lease_id is None:
        assert one.topic is not None
        assert one.partition is not None
        assert offsets is not None
        lease_id = call.state.verbs.live_lease(one.topic, one.group or DEFAULT_GROUP, one.partition, offsets[0])
    else:
        place = call.state.verbs.lease_place(lease_id)
        elsewhere = place is not None and (one.topic not in (None, place[0]) or one.partition not in (None, place[2]))
        if place is None or elsewhere:
            raise LeaseLost(f"lease {lease_id} holds nothing of what is named", REMEDY, lost=offsets or ())
    return _Held(lease_id=lease_id, offsets=offsets)


def _turn_of(one: Ack) -> object:
    return one.lease_id or (one.topic, one.group, one.partition, *(one.offsets or ()))


async def _settle(call: Call, body: AckIn, outcome: Kind, verb: Callable[[UUID, list[int] | None], Settled]) -> Answer:
    wanted = _acks(call, body)
    await _allow(call, wanted)
    counts: list[tuple[UUID, int, int]] = []

    def settle_all() -> SettledOut:
        done: list[Settled] = []
        losses: list[tuple[Ack, LeaseLost]] = []
        held: list[tuple[Ack, _Held]] = []
        for one in wanted:  # all of them first: whatever else is wrong with one is found before anything is settled
            try:
                held.append((one, _resolved(call, one)))
            except LeaseLost as error:
                losses.append((one, error))
        for one, found in held:
            try:
                result = verb(found.lease_id, found.offsets)
            except LeaseLost as error:
                losses.append((one, error))
                continue
            if not result.already:
                counts.append((found.lease_id, result.settled, len(result.dead)))
            done.append(result)
        if losses and len(wanted) == 1:
            raise losses[0][1]
        if losses:
            raise _some_lost([offset for one, error in losses for offset in error.lost or one.offsets or ()])
        return SettledOut.of(*done)

    try:
        async with call.state.threads.turn(_turn_of(wanted[0])):
            return Answer(encode(await call.state.quick(settle_all)))
    finally:
        for lease_id, count, died in counts:
            call.state.metrics.settled(lease_id, outcome, count)
            call.state.metrics.died(lease_id, died)


@table.operation("POST", "/messages/nack", body=NackIn, answer=SettledOut, example={**_EXAMPLE, "error": "timeout"})
async def nack(call: Call) -> Answer:
    """Messages have failed.

    They are tried again by the policy of the group, or after `delay`, and are dead at its limit, or at once with
    `requeue` false.
    """
    call.allow("consume")
    body: NackIn = call.body
    return await _settle(
        call,
        body,
        "nack" if body.requeue else "reject",
        lambda lease, offsets: call.engine.nack(
            lease, offsets, error=body.error, delay=body.delay, requeue=body.requeue
        ),
    )


@table.operation("POST", "/messages/release", body=AckIn, answer=SettledOut, example=_EXAMPLE)
async def release(call: Call) -> Answer:
    """Give messages back: ready at once, and the delivery does not count."""
    call.allow("consume")
    return await _settle(call, call.body, "release", call.engine.release)


@table.operation("POST", "/messages/later", body=LaterIn, answer=SettledOut, example={**_EXAMPLE, "after": "5m"})
async def later(call: Call) -> Answer:
    """Not now: ready again after that time, and the delivery does not count."""
    call.allow("consume")
    body: LaterIn = call.body
    return await _settle(
        call, body, "later", lambda lease, offsets: call.engine.later(lease, offsets, after=body.after)
    )


@table.operation(
    "POST",
    "/messages/settle",
    body=SettleIn,
    answer=SettledOut,
    example={
        "lease_id": "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e",
        "outcomes": [{"offset": 42, "outcome": "ack"}, {"offset": 43, "outcome": "nack", "error": "timeout"}],
    },
)
async def settle(call: Call) -> Answer:
    """Many outcomes of one lease, in one commit."""
    call.allow("consume")
    body: SettleIn = call.body
    call.require_batch(len(body.outcomes))
    outcomes: dict[int, Outcome] = {}
    for given in body.outcomes:
        if given.offset in outcomes:
            raise InvalidArgument(f"offset {given.offset} has two outcomes", path="$.outcomes")
        outcomes[given.offset] = Outcome(given.outcome, error=given.error, delay=given.delay)
    await _allow(call, [Ack(lease_id=body.lease_id, offsets=None)])
    async with call.state.threads.turn(body.lease_id):
        done = await call.state.quick(call.engine.settle, body.lease_id, outcomes)
    if not done.already:
        for kind, count in Counter(outcome.kind for outcome in outcomes.values()).items():
            call.state.metrics.settled(body.lease_id, kind, count)
        call.state.metrics.died(body.lease_id, len(done.dead))
    return Answer(encode(SettledOut.of(done)))


@table.operation(
    "POST",
    "/messages/extend-visibility",
    body=ExtendIn,
    answer=DeadlineOut,
    example={**_EXAMPLE, "timeout_seconds": 60},
)
async def extend(call: Call) -> Answer:
    """Set the deadline to now plus the timeout.

    For one message, or with a lease alone for all of it; without a timeout it is the one of the group. If the lease has
    lost some of its messages, the others are extended, and the answer is `lease_lost`.
    """
    call.allow("consume")
    body: ExtendIn = call.body
    wanted = _one(call, body, None)
    await _allow(call, [wanted])
    held = await call.state.quick(_resolved, call, wanted)
    offset = None if held.offsets is None else held.offsets[0]
    async with call.state.threads.turn(held.lease_id):
        deadline = await call.state.quick(call.engine.extend, held.lease_id, body.timeout_seconds, offset=offset)
    return Answer(encode(DeadlineOut(deadline)))
