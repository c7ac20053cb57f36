"""Bodies of requests. An unknown field is refused with its path, so that misspelt names are found."""

from __future__ import annotations

import base64
import binascii
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Self
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from custody.errors import InvalidArgument, TooLarge
from custody.model.codec import encode_event, encode_message
from custody.model.entities import DEFAULT_GROUP, Outgoing
from custody.model.lanes import Priority
from custody.model.outcomes import Kind, Outcome
from custody.model.routing import LONGEST, ROUTING_KEY
from custody.wire.fields import Duration, Name, Offset, Partition, Positive, Sent, Small, Text, Timeout, When

ROUTING_KEY_PATTERN = r"^[^.*>\u0000]+(\.[^.*>\u0000]+)*$"


class Shape(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A body, or a part of one. Fields with their default are not sent."""


class _Room(threading.local):
    """How many more elements the body may have that this thread decodes."""

    left: float = math.inf


_room = _Room()


@contextmanager
def at_most(elements: int) -> Iterator[None]:
    """Refuses a body with more elements while it is decoded: msgspec checks the length of a list only at its end."""
    _room.left = elements
    try:
        yield
    finally:
        _room.left = math.inf


class Element(Shape):
    """A part of a body that may occur many times; counted by `at_most`."""

    def __post_init__(self) -> None:
        _room.left -= 1
        if _room.left < 0:
            raise TooLarge("the body names more messages than one request may have", "Send several requests.")


class Content(Element):
    """The content of a message: `payload` is any JSON value, `payload_base64` bytes."""

    payload: msgspec.Raw | UnsetType = UNSET
    payload_base64: str | UnsetType = UNSET
    key: Text | None = None
    headers: dict[Text, Text] | None = None

    def decoded(self, path: str) -> msgspec.Raw | bytes:
        """The payload. `path` is the prefix of the path in an error."""
        if (self.payload is UNSET) == (self.payload_base64 is UNSET):
            said = "a message needs a payload or a payload_base64, and not both"
            raise InvalidArgument(said, "Give one of them.", path=f"{path}.payload")
        if self.payload_base64 is UNSET:
            return self.payload  # type: ignore[return-value]  # one of them is given
        try:
            return base64.b64decode(self.payload_base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidArgument(
                f"payload_base64 is not base64: {error}",
                "Encode the payload with padding.",
                path=f"{path}.payload_base64",
            ) from error


def content_of(message: Outgoing) -> dict[str, Any]:
    """The fields of a message's content. The routing key is one of its headers."""
    _, kind, payload, _ = encode_message(message)
    if kind == b"b":
        said: dict[str, Any] = {"payload_base64": base64.b64encode(payload).decode()}
    else:
        said = {"payload": msgspec.Raw(payload if kind == b"j" else msgspec.json.encode(payload.decode()))}
    headers = None if message.headers is None else dict(message.headers)
    if message.routing_key is not None:
        headers = {**(headers or {}), ROUTING_KEY: message.routing_key}
    return {**said, "key": message.key, "headers": headers}


class MessageIn(Content):
    """A message to publish: `payload` is any JSON value, `payload_base64` bytes.

    If both `key` and `partition` are given, the partition must be the key's own, unless `allow_split` gives up the
    key's order."""

    topic: Name | None = None
    partition: Partition | None = None
    priority: Priority | None = None
    routing_key: Annotated[str, Meta(max_length=LONGEST, pattern=ROUTING_KEY_PATTERN)] | None = None
    delay: Duration | None = None
    deliver_at: When | None = None
    allow_split: bool = False


class PublishIn(MessageIn):
    """One message, or many as `messages`; `topic` is then the default for those without a topic.

    With `producer_id`, `epoch` and the `sequence` of the first message it is idempotent: a repeat returns the first
    receipts. With `transaction_id` the messages are added to the transaction; `first` is the number of the first one,
    so that a repeat adds nothing.
    """

    messages: list[MessageIn] | UnsetType = UNSET
    producer_id: Name | None = None
    epoch: Positive | None = None
    sequence: Offset | None = None
    expected_offset: Offset | None = None
    transaction_id: UUID | None = None
    first: Small | None = None


class MessageRef(Element):
    """A delivered message: named by its `receipt`, or by its place together with the `lease_id`.

    A receipt names one delivery. A place alone means the current delivery, whoever has it.
    """

    receipt: Text | None = None
    lease_id: UUID | None = None
    topic: Name | None = None
    group: Name = DEFAULT_GROUP
    partition: Partition | None = None
    offset: Offset | None = None


class AckIn(MessageRef):
    """One message, or several of a lease as `offsets` (default: all that are not settled), or any as `messages`."""

    offsets: list[Offset] | None = None
    messages: list[MessageRef] | None = None


class OutcomeOfIn(AckIn):
    """Messages and their outcome. Each subclass is the body of an operation, and describes it."""

    EXAMPLE: ClassVar[dict[str, str]] = {}

    def value(self) -> Outcome:
        raise NotImplementedError


class NackIn(OutcomeOfIn):
    """Mark messages as failed.

    They are retried by the policy of the group, or after `delay`. They are dead at the limit of the policy, or at once
    with `requeue` false.
    """

    EXAMPLE = {"error": "timeout"}
    requeue: bool = True
    error: str | None = None
    delay: Duration | None = None
    traceback: str | None = None

    def value(self) -> Outcome:
        kind: Kind = "nack" if self.requeue else "reject"
        return Outcome(kind, error=self.error, delay=self.delay, traceback=self.traceback)


class ReleaseIn(OutcomeOfIn):
    """Give messages back: they are ready at once, and the delivery does not count as an attempt."""

    def value(self) -> Outcome:
        return Outcome("release")


class LaterIn(OutcomeOfIn, kw_only=True):
    """Postpone messages: they are ready again after that time, and the delivery does not count as an attempt."""

    EXAMPLE = {"after": "5m"}
    after: Duration

    def value(self) -> Outcome:
        return Outcome("later", delay=self.after)


class SkipIn(OutcomeOfIn):
    """Skip messages that are not needed: they count as done, and the journal has the reason."""

    EXAMPLE = {"reason": "the order was cancelled"}
    reason: str | None = None

    def value(self) -> Outcome:
        return Outcome("skip", error=self.reason)


SETTLING: dict[str, type[OutcomeOfIn]] = {"nack": NackIn, "release": ReleaseIn, "later": LaterIn, "skip": SkipIn}


class OutcomeIn(Element):
    """The outcome of messages."""

    outcome: Kind
    error: str | None = None
    delay: Duration | None = None
    traceback: str | None = None

    def value(self) -> Outcome:
        return Outcome(self.outcome, error=self.error, delay=self.delay, traceback=self.traceback)


class OffsetOutcomeIn(OutcomeIn, kw_only=True):
    """The outcome of one message."""

    offset: Offset


class SettleIn(Shape):
    """Outcomes of messages of one lease, or one for `all` of it that are not settled, in one commit."""

    lease_id: UUID
    outcomes: list[OffsetOutcomeIn] | None = None
    all: OutcomeIn | None = None


class ExtendIn(MessageRef):
    """Sets the deadline to now plus the timeout: for one message, or for a lease if only that is named."""

    timeout_seconds: Timeout | None = None


class EventIn(Content, kw_only=True):
    """An event of another database's outbox. It is published once for each `event_id` and number of replays."""

    event_id: UUID
    replays: Small = 0

    @classmethod
    def of(cls, event_id: UUID, replays: int, message: Outgoing) -> Self:
        encode_event(event_id, replays, message)  # refuses values that the verb itself would refuse
        return cls(event_id=event_id, replays=replays, **content_of(message))


def _events(sent: Sequence[EventIn]) -> list[tuple[UUID, int, Outgoing]]:
    return [
        (event.event_id, event.replays, Outgoing(event.decoded(f"[{number}]"), key=event.key, headers=event.headers))
        for number, event in enumerate(sent)
    ]


GivenEvents = Annotated[
    Sequence[tuple[UUID, int, Outgoing]],
    Sent(list[EventIn], lambda events: [EventIn.of(*event) for event in events], _events),
]
