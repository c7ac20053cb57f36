"""Publishing: `POST /messages`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from custody import tracing
from custody.coalesced import Publish
from custody.errors import InvalidArgument
from custody.http.answer import Answer
from custody.http.call import Call
from custody.http.operation import Table
from custody.model.entities import Delayed, Outgoing, Receipt
from custody.verbs.producer import producer_identity
from custody.wire.answers import AddedOut
from custody.wire.messages import PlacedOut, ReceiptsOut
from custody.wire.requests import MessageIn, PublishIn

table = Table("messages")

COALESCED = 64
"""Messages: larger batches get a transaction of their own, because they gain little by sharing and delay others."""

_EXAMPLE = {"topic": "orders", "key": "SKU-123", "payload": {"sku": "SKU-123", "add": 100}}
encode = msgspec.json.encode
Messages = Sequence[tuple[str, Outgoing]]


@table.operation(
    "POST",
    "/messages",
    body=PublishIn,
    answer=PlacedOut | ReceiptsOut,
    other={202: AddedOut},
    example=_EXAMPLE,
)
async def publish(call: Call) -> Answer:
    """Publish one message, or many.

    They are durable when the answer comes. Many are published all or nothing, also to several topics. In a transaction
    (202) they are visible only after its commit.
    """
    call.allow("produce")
    body: PublishIn = call.body
    given = [body] if body.messages is UNSET else body.messages
    if body.messages is not UNSET:
        _require_many(body)
    call.require_batch(len(given))
    listed: list[tuple[str, Outgoing]] = []
    for number, message in enumerate(given):
        path = "$" if body.messages is UNSET else f"$.messages[{number}]"
        listed.append((_topic(message, body, path), outgoing(message, path)))
    topics = {topic for topic, _ in listed}
    call.allow("produce", *topics)
    with tracing.publishing(topics, len(listed)):
        # done here, because the threads that publish have no current span
        messages = tracing.traced_each(listed)
        if body.transaction_id is not None:
            return await _add(call, body, messages)
        placed = await _publish(call, _publish_of(body, messages))
    call.state.metrics.published(placed)
    # encoded without conversion: receipts have the fields of a PlacedOut
    return Answer(encode(placed[0] if body.messages is UNSET else {"receipts": placed}))


def _require_many(body: PublishIn) -> None:
    """Refuses fields of a single message beside `messages`: they would have no effect."""
    for name in MessageIn.__struct_fields__:
        value = getattr(body, name)
        if name != "topic" and not (value is UNSET or value is None or value is False):
            raise InvalidArgument(
                f"{name} cannot be given beside `messages`", "Give it with each message.", path=f"$.{name}"
            )


def _topic(message: MessageIn, body: PublishIn, path: str) -> str:
    topic = message.topic or body.topic
    if topic is None:
        raise InvalidArgument(
            "a message needs a topic", "Give `topic` with each message, or once for all.", path=f"{path}.topic"
        )
    return topic


def outgoing(message: MessageIn, path: str = "$") -> Outgoing:
    if message.delay is not None and message.deliver_at is not None:
        raise InvalidArgument(
            "a message has delay or deliver_at, not both", "Leave one of them out.", path=f"{path}.deliver_at"
        )
    return Outgoing(
        message.decoded(path),
        key=message.key,
        headers=message.headers,
        partition=message.partition,
        priority=message.priority,
        routing_key=message.routing_key,
        delay=message.delay,
        deliver_at=message.deliver_at,
        allow_split=message.allow_split,
    )


def _publish_of(body: PublishIn, messages: Messages) -> Publish:
    producer = producer_identity(body.producer_id, body.epoch, body.sequence)
    if body.first is not None:
        raise InvalidArgument("`first` numbers the messages of a transaction", "Give its transaction_id too.")
    return Publish(messages=messages, producer=producer, expected_offset=body.expected_offset)


async def _publish(call: Call, wanted: Publish) -> list[Receipt | Delayed]:
    if len(wanted.messages) <= COALESCED:
        return await call.state.publishes.submit(wanted, call.size)
    return await call.state.batches.submit(wanted)


async def _add(call: Call, body: PublishIn, messages: Messages) -> Answer:
    if body.producer_id is not None or body.sequence is not None or body.expected_offset is not None:
        raise InvalidArgument(
            "a transaction has a producer already, and offsets only after its commit",
            "Leave out producer_id, sequence and expected_offset.",
        )
    assert body.transaction_id is not None
    count = await call.state.quick(call.engine.transactions.add_all, body.transaction_id, messages, first=body.first)
    return Answer(encode(AddedOut(body.transaction_id, count)), 202)
