"""Publishing, and the log as it is: `/messages`, delayed messages, reading by offset."""

from __future__ import annotations

import base64
import binascii
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
from custody.wire.answers import AddedOut, CountOut
from custody.wire.messages import PlacedOut, ReceiptsOut
from custody.wire.requests import EventIn, EventsIn, MessageIn, PublishIn

table = Table("messages")

COALESCED = 64
"""Larger batches have a transaction of their own: they gain little from company and would hold it up."""

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

    Durable when answered. Many are all or nothing, over several topics too. In a transaction (202) nobody sees them
    before its commit.
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
        # here: the threads that publish have no current span
        messages = tracing.traced_each(listed)
        if body.transaction_id is not None:
            return await _add(call, body, messages)
        placed = await _publish(call, _publish_of(body, messages))
    call.state.metrics.published(placed)
    # as they are: they have the fields of a PlacedOut
    return Answer(encode(placed[0] if body.messages is UNSET else {"receipts": placed}))


def _require_many(body: PublishIn) -> None:
    """Refuses beside `messages` what belongs to each of them: it would be of no effect."""
    for name in MessageIn.__struct_fields__:
        value = getattr(body, name)
        if name != "topic" and not (value is UNSET or value is None or value is False):
            raise InvalidArgument(f"{name} belongs to one message, and there are many", path=f"$.{name}")


def _topic(message: MessageIn, body: PublishIn, path: str) -> str:
    topic = message.topic or body.topic
    if topic is None:
        raise InvalidArgument(
            "a message needs a topic", "Give `topic` with each message, or once for all.", path=f"{path}.topic"
        )
    return topic


def payload_of(message: MessageIn | EventIn, path: str) -> object:
    if (message.payload is UNSET) == (message.payload_base64 is UNSET):
        raise InvalidArgument("a message has a payload or a payload_base64, and one of them", path=f"{path}.payload")
    if message.payload_base64 is UNSET:
        return message.payload
    try:
        return base64.b64decode(message.payload_base64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"it is not base64: {error}", path=f"{path}.payload_base64") from error


def outgoing(message: MessageIn, path: str = "$") -> Outgoing:
    if message.delay is not None and message.deliver_at is not None:
        raise InvalidArgument("a message has a delay or a time of delivery, not both", path=f"{path}.deliver_at")
    return Outgoing(
        payload_of(message, path),
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
        raise InvalidArgument("a transaction has a producer already, and offsets only after its commit")
    assert body.transaction_id is not None
    count = await call.state.quick(call.engine.transactions.add_all, body.transaction_id, messages, first=body.first)
    return Answer(encode(AddedOut(body.transaction_id, count)), 202)


@table.operation(
    "POST",
    "/topics/{topic}/events",
    body=EventsIn,
    answer=CountOut,
    example={"events": [{"event_id": "3f0c6f4e-6d7b-4f2c-9a63-0c8a5d2f1b7e", "payload": {"order": 17}}]},
)
async def receive_events(call: Call) -> object:
    """Publish events of an outbox elsewhere, all or none: each once, however often it is brought.

    Ids are compared within the topic, the API key and the `source`. The answer counts those that had not come before.
    """
    call.allow("produce", call.topic)
    body: EventsIn = call.body
    call.require_batch(len(body.events))
    events = []
    for number, event in enumerate(body.events):
        payload = payload_of(event, f"$.events[{number}]")
        events.append((event.event_id, event.replays, Outgoing(payload, key=event.key, headers=event.headers)))
    # the name of a key has no slash, so that none can pass for another
    source = body.source if call.caller.name is None else f"{call.caller.name}/{body.source}"
    return CountOut(await call.state.append(call.engine.receive_events, call.topic, events, source=source))
