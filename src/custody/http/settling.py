"""Settling: ack, nack, release, later, extend. Each is fenced by the lease, or by a receipt, which contains its id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import msgspec

from custody.coalesced import Ack
from custody.errors import CustodyError, InvalidArgument, LeaseLost
from custody.http.answer import Answer
from custody.http.call import Call, lease_of_receipt
from custody.http.operation import Table
from custody.model.entities import DEFAULT_GROUP, Settled
from custody.model.outcomes import Outcome
from custody.verbs.settle import REMEDY, for_each
from custody.wire.answers import DeadlineOut
from custody.wire.requests import SETTLING, AckIn, ExtendIn, MessageRef, OutcomeOfIn, SettleIn
from custody.wire.settled import SettledOut

table = Table("messages")

_EXAMPLE = {"topic": "orders", "partition": 0, "offset": 42, "receipt": "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e:42"}
encode = msgspec.json.encode


@table.operation("POST", "/messages/ack", body=AckIn, answer=SettledOut, example=_EXAMPLE)
async def ack(call: Call) -> Answer:
    """Mark messages as done.

    Name one by its receipt, several of a lease by their offsets, a whole lease, or any of these as `messages`: one
    request, one commit. If a lease has lost messages, the answer is `lease_lost`, and the others are done. A repeated
    ack of the same lease is a success, with `already`.
    """
    call.allow("consume")
    wanted = _acks(call, call.body)
    await _allow(call, wanted)
    if len(wanted) == 1:
        settled = await call.state.acks.submit(wanted[0])
        _count(call, wanted[0], settled)
        return Answer(encode(SettledOut.of(settled)))
    answers = await call.state.ack_together(wanted)
    for answer, one in zip(answers, wanted, strict=True):
        if isinstance(answer, Settled):
            _count(call, one, answer)
    return Answer(encode(SettledOut.of(*_all_good(answers, wanted))))


def _count(call: Call, one: Ack, settled: Settled) -> None:
    metrics = call.state.metrics
    if settled.already:
        return  # counted the first time
    if one.lease_id is not None:
        metrics.settled(one.lease_id, "ack", settled.settled)
    elif one.topic is not None:
        metrics.settled_in(one.topic, one.group or DEFAULT_GROUP, "ack", settled.settled)


async def ack_first(call: Call, which: str) -> Settled | LeaseLost:
    """The ack that a receive begins with: of a whole lease, or of the message of a receipt. It is done at once, however
    long the receive waits then, and a repeat of it is a success."""
    one = _earlier(call, which)
    await _allow(call, [one])
    try:
        settled = await call.state.acks.submit(one)
    except LeaseLost as error:
        return error
    _count(call, one, settled)
    return settled


def _earlier(call: Call, which: str) -> Ack:
    try:
        if ":" in which:
            lease_id, offset = lease_of_receipt(which)
            return Ack(lease_id=lease_id, offsets=[offset], worker=call.worker)
        return Ack(lease_id=UUID(which), offsets=None, worker=call.worker)
    except (ValueError, InvalidArgument):
        raise InvalidArgument(
            f"{which[:100]!r} is neither a lease nor a receipt", "Send a `lease_id` or a `receipt`.", path="$.ack"
        ) from None


def _acks(call: Call, body: AckIn) -> list[Ack]:
    if body.messages is None:
        call.require_batch(len(body.offsets or ()))
        return [_one(call, body, body.offsets)]
    if body.offsets is not None or body.offset is not None or body.receipt is not None:
        raise InvalidArgument(
            "`messages` cannot be combined with `offsets`, `offset` or `receipt`", "Name the messages in one way."
        )
    if not body.messages:
        raise InvalidArgument("`messages` is empty", "Name at least one message.", path="$.messages")
    call.require_batch(len(body.messages))
    every = [
        _one(call, message if message.lease_id or body.lease_id is None else _of_lease(message, body), None)
        for message in body.messages
    ]
    # messages of one lease are settled together: in an ordered group, an earlier message of a key has to be settled no
    # later than the next one
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
    """The lease and offsets that one reference means."""
    lease_id, offset = ref.lease_id, ref.offset
    if ref.receipt is not None:
        lease_id, named = lease_of_receipt(ref.receipt)
        if offset not in (None, named) or ref.lease_id not in (None, lease_id):
            raise InvalidArgument(
                "the receipt belongs to another message than `offset` or `lease_id`", "Send the receipt alone."
            )
        offset = named
    if offset is not None:
        if offsets is not None:
            raise InvalidArgument("`offset` and `offsets` are both given", "Leave one of them out.")
        offsets = [offset]
    if lease_id is None and (ref.topic is None or ref.partition is None or offset is None):
        raise InvalidArgument(
            "the request does not name a message", "Give its receipt, or the lease_id, or topic, partition and offset."
        )
    if offsets is not None and not offsets:
        raise InvalidArgument(
            "`offsets` is empty",
            "Name offsets, or leave it out for all messages of the lease that are not settled.",
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
    """Refuses if the key has no right to consume one of the topics. If only a lease is named, looks up its topic."""
    if call.caller.may_everywhere("consume"):
        return
    for one in wanted:
        if one.topic is not None:  # if its lease is of another topic, nothing is settled
            call.allow("consume", one.topic)
            continue
        assert one.lease_id is not None
        place = await call.state.place_of(one.lease_id)
        call.allow(
            "consume", *([] if place is None else [place[0]])
        )  # no place: the lease holds nothing that could be changed


def _all_good(answers: Sequence[Settled | CustodyError], wanted: Sequence[Ack]) -> list[Settled]:
    """Raises the first error other than a lost lease, or one LeaseLost with all lost offsets."""
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
    return LeaseLost("the lease no longer holds some of the messages; the others are settled", REMEDY, lost=offsets)


@dataclass(frozen=True, kw_only=True)
class _LeaseOffsets:
    """A lease, and which of its offsets to settle; None means all."""

    lease_id: UUID
    offsets: list[int] | None


def _resolved(call: Call, one: Ack) -> _LeaseOffsets:
    """The lease of a reference. Refuses it if the lease is of another topic or partition than the request says."""
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
            raise LeaseLost(f"lease {lease_id} does not hold the named messages", REMEDY, lost=offsets or ())
    return _LeaseOffsets(lease_id=lease_id, offsets=offsets)


def _turn_of(one: Ack) -> object:
    return one.lease_id or (one.topic, one.group, one.partition, *(one.offsets or ()))


async def _settle(call: Call, body: AckIn, outcome: Outcome) -> Answer:
    wanted = _acks(call, body)
    await _allow(call, wanted)
    counts: list[tuple[UUID, int, int]] = []

    def settle_all() -> SettledOut:
        done: list[Settled] = []
        losses: list[tuple[Ack, LeaseLost]] = []
        held: list[tuple[Ack, _LeaseOffsets]] = []
        for one in wanted:  # all of them first, so that any other error is found before anything is settled
            try:
                held.append((one, _resolved(call, one)))
            except LeaseLost as error:
                losses.append((one, error))
        for one, found in held:
            try:
                result = call.engine.settle(found.lease_id, for_each(found.offsets, outcome))
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
            call.state.metrics.settled(lease_id, outcome.kind, count)
            call.state.metrics.died(lease_id, died)


def _add(name: str, body: type[OutcomeOfIn]) -> None:
    """Adds an operation for messages of any lease. Its description is that of its body."""

    async def handler(call: Call) -> Answer:
        call.allow("consume")
        return await _settle(call, call.body, call.body.value())

    handler.__name__, handler.__doc__ = name, body.__doc__
    example = {**_EXAMPLE, **body.EXAMPLE}
    table.operation("POST", f"/messages/{name}", body=body, answer=SettledOut, example=example)(handler)


for name, body in SETTLING.items():
    _add(name, body)


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
    """Settle messages of one lease, each with its own outcome, or `all` that are not settled with one."""
    call.allow("consume")
    body: SettleIn = call.body
    outcomes = _outcomes(call, body)
    await _allow(call, [Ack(lease_id=body.lease_id, offsets=None)])
    async with call.state.threads.turn(body.lease_id):
        done = await call.state.quick(call.engine.settle, body.lease_id, outcomes)
    if not done.already:
        many = [outcomes] * done.settled if isinstance(outcomes, Outcome) else outcomes.values()
        for kind, count in Counter(outcome.kind for outcome in many).items():
            call.state.metrics.settled(body.lease_id, kind, count)
        call.state.metrics.died(body.lease_id, len(done.dead))
    return Answer(encode(SettledOut.of(done)))


def _outcomes(call: Call, body: SettleIn) -> dict[int, Outcome] | Outcome:
    if (body.outcomes is None) == (body.all is None):
        raise InvalidArgument("the request names no outcome", "Give `outcomes` by offset, or one for `all`.")
    if body.all is not None:
        return body.all.value()
    given = body.outcomes or []
    call.require_batch(len(given))
    outcomes: dict[int, Outcome] = {}
    for one in given:
        if one.offset in outcomes:
            raise InvalidArgument(f"offset {one.offset} has two outcomes", "Give one.", path="$.outcomes")
        outcomes[one.offset] = one.value()
    return outcomes


@table.operation(
    "POST",
    "/messages/extend-visibility",
    body=ExtendIn,
    answer=DeadlineOut,
    example={**_EXAMPLE, "timeout_seconds": 60},
)
async def extend(call: Call) -> Answer:
    """Set the deadline to now plus the timeout.

    It is for one message, or for a whole lease if only that is named. Without a timeout the group's own is used. If the
    lease has lost some of its messages, the others are extended, and the answer is `lease_lost`.
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
