"""Producers with an identity, and their transactions: `/producers`, `/transactions`."""

from __future__ import annotations

from custody.errors import InvalidArgument
from custody.http.call import Call
from custody.http.derived import by_hand
from custody.http.operation import Table
from custody.wire.answers import CommittedOut, ProducerOut
from custody.wire.requests import ProducerIn, TransactionAckIn

table = Table("producers")

_TRANSACTION = {"transaction_id": "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e"}
_ACK = {**_TRANSACTION, "lease_id": "0b6f5a52-8a3e-4a5b-9a54-5d1f3d8f0c11", "offsets": [42, 43]}


@table.operation(
    "POST", "/producers/init", body=ProducerIn, answer=ProducerOut, example={"producer_id": "order-service-1"}
)
async def init_producer(call: Call) -> object:
    """Take over as this producer: a new epoch, sequence 0; older instances are fenced from now on."""
    call.allow("produce")
    body: ProducerIn = call.body
    if not body.idempotent:
        raise InvalidArgument(
            "a producer is idempotent",
            "To publish without one, leave out producer_id, epoch and sequence.",
            path="$.idempotent",
        )
    producer = await call.state.quick(call.engine.init_producer, body.producer_id)
    return ProducerOut(
        producer_id=producer.producer_id,
        epoch=producer.epoch,
        last_sequence=producer.next_sequence - 1,
        last_receipt=None,
    )


@by_hand
async def producer(call: Call) -> object:
    """It needs the right on the topic of the last receipt too."""
    call.allow("produce")
    found = await call.state.read(call.engine.producer, call.params["producer_id"])
    if found.last_receipt is not None:  # it tells where the topic ends
        call.allow("produce", found.last_receipt.topic)
    return ProducerOut.of(found)


@table.operation("POST", "/transactions/ack", body=TransactionAckIn, answer=None, status=204, example=_ACK)
async def ack_in_transaction(call: Call) -> object:
    """Messages of a lease are done with the commit, or not at all."""
    call.allow("consume")
    body: TransactionAckIn = call.body
    call.require_batch(len(body.offsets or ()))
    place = await call.state.place_of(body.lease_id)
    call.allow("consume", *([] if place is None else [place[0]]))
    await call.state.quick(call.engine.transactions.ack, body.transaction_id, body.lease_id, body.offsets)
    return None


@by_hand
async def commit(call: Call) -> object:
    """Repeats of one commit take turns, and what it publishes is counted."""
    call.allow("produce")
    transaction_id = call.body.transaction_id
    async with call.state.threads.turn(transaction_id):
        receipts = await call.state.append(call.engine.transactions.commit, transaction_id)
    call.state.metrics.published(receipts)
    return CommittedOut.of(receipts, transaction_id=transaction_id)
