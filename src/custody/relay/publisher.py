"""The interface of publishers: each call is one attempt to publish an event to its destination.

Several threads use a publisher at once. It passes payload and headers on unchanged. It returns when the event has
arrived. It raises `PublishFailed` (or any other exception) if the event has to be retried, `PublishRefused` if a retry
would be useless, and `PublisherUnavailable` if its destination is down: then the relay waits, and no event dies of it.
`busy=True` means that the destination is only overloaded: then no event is suspected to be the cause. `retry_after` is
the number of seconds to wait.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import IO
from uuid import UUID

import msgspec

from custody.model.codec import decode
from custody.model.entities import Payload


class ClaimedEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An event as a publisher gets it. `data` has the written bytes; `payload` is the decoded value."""

    id: int
    event_id: UUID
    event_type: str
    destination: str
    kind: str
    data: bytes
    headers: dict[str, str] = {}
    partition_key: str | None = None
    ordering_key: str | None = None
    created_at: datetime
    attempts: int = 0
    replays: int = 0

    @property
    def payload(self) -> Payload:
        return decode(self.kind, self.data)

    @property
    def key(self) -> str | None:
        """The key at the destination: ordering_key, or else partition_key."""
        return self.ordering_key if self.ordering_key is not None else self.partition_key

    @property
    def address(self) -> str:
        """The part of the destination after the colon."""
        return self.destination.partition(":")[2]


class Publisher:
    """The base class of publishers: implement `publish`."""

    whole_batches = False
    """True if `publish_many` publishes all events or none. Then the relay calls it with all events that it has."""

    def publish(self, event: ClaimedEvent) -> None:
        """Makes one attempt. Returns when the event has arrived."""
        raise NotImplementedError

    def publish_many(self, events: Sequence[ClaimedEvent]) -> None:
        """Makes one attempt for all events, in this order. If it raises, none of them has arrived."""
        for event in events:
            self.publish(event)

    def close(self) -> None:
        """Called when the relay has ended."""


class FunctionPublisher(Publisher):
    """Calls a function with each event."""

    def __init__(self, function: Callable[[ClaimedEvent], object]) -> None:
        self._function = function

    def publish(self, event: ClaimedEvent) -> None:
        self._function(event)


class StdoutPublisher(Publisher):
    """Prints each event as a line of JSON."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def publish(self, event: ClaimedEvent) -> None:
        document: dict[str, object] = {
            "event_id": event.event_id,
            "event_type": event.event_type,
            "destination": event.destination,
            "key": event.key,
            "headers": event.headers,
            "created_at": event.created_at,
        }
        if event.kind == "b":
            document["payload_base64"] = event.data
        elif event.kind == "t":
            document["payload"] = event.payload
        else:  # unchanged, but on one line: JSON has line breaks only where a space is allowed
            written = msgspec.json.decode(event.data, type=msgspec.Raw)
            document["payload"] = msgspec.Raw(bytes(written).replace(b"\n", b" ").replace(b"\r", b" "))
        line = msgspec.json.encode(document).decode()
        with self._lock:
            print(line, file=self._stream or sys.stdout, flush=True)
