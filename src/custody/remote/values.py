"""Values on their way into a request. What could not be stored is refused here, as the direct connection does."""

from __future__ import annotations

import base64
from uuid import UUID

import msgspec
from msgspec import UNSET, UnsetType

from custody.errors import PartitionNotFound
from custody.model.codec import encode_event, encode_message
from custody.model.entities import Outgoing
from custody.model.retention import Retention
from custody.model.routing import ROUTING_KEY
from custody.verbs.delays import require_time
from custody.wire.fields import LARGEST, Duration
from custody.wire.requests import EventIn, MessageIn


def outgoing(message: Outgoing, topic: str | None = None) -> MessageIn:
    """A message to publish."""
    if message.delayed:
        require_time(message)
    payload, payload_base64 = _payload(message)
    require_partition(message.partition)
    return MessageIn(
        topic=topic,
        payload=payload,
        payload_base64=payload_base64,
        key=message.key,
        headers=_headers(message),
        partition=message.partition,
        priority=message.priority,
        delay=Duration.of(message.delay),
        deliver_at=message.deliver_at,
        allow_split=message.allow_split,
    )


def event(event_id: UUID, replays: int, message: Outgoing) -> EventIn:
    """An event of an outbox elsewhere."""
    encode_event(event_id, replays, message)
    payload, payload_base64 = _payload(message)
    return EventIn(
        event_id=event_id,
        replays=replays,
        payload=payload,
        payload_base64=payload_base64,
        key=message.key,
        headers=_headers(message),
    )


def _payload(message: Outgoing) -> tuple[msgspec.Raw | UnsetType, str | UnsetType]:
    """The payload as JSON, or else in base64."""
    _, kind, payload, _ = encode_message(message)
    if kind == b"b":
        return UNSET, base64.b64encode(payload).decode()
    return msgspec.Raw(payload if kind == b"j" else msgspec.json.encode(payload.decode())), UNSET


def _headers(message: Outgoing) -> dict[str, str] | None:
    """The headers, the routing key among them."""
    if message.routing_key is not None:
        return {**(message.headers or {}), ROUTING_KEY: message.routing_key}
    return None if message.headers is None else dict(message.headers)


def possible(offset: int) -> bool:
    """Whether a server takes this for an offset at all."""
    return 0 <= offset <= LARGEST


def require_partition(partition: int | None) -> None:
    """Refuses what can be no partition: in a path or a body it would be taken for a mistake of the client's."""
    if partition is not None and not 0 <= partition < 2**31:
        raise PartitionNotFound(f"there is no partition {partition}", "Partitions are counted from 0.")


def fits(kept: Retention | None, asked: Retention | None) -> bool:
    """Whether a topic keeps what was asked for; what was left open has been filled in."""
    if kept is None or asked is None:
        return kept is asked
    found = kept.columns()
    return all(found[name] == value for name, value in asked.columns().items() if value is not None)
