"""What a publisher is: it takes an event somewhere else, one attempt for each call, and says what came of it.

A publisher is used by several threads at once. It passes payload and headers on as they are. It returns when the event
has arrived, and raises `PublishFailed` (or anything else) when it is to be tried again, `PublishRefused` when that
would be useless, and `PublisherUnavailable` when its destination cannot be reached: then the relay waits, and no event
dies of it (`busy=True` if it only takes no more for now: then no event is ever taken for the reason). `retry_after`
says for how many seconds it wants to be left alone.
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
    """An event as a publisher gets it. `data` are the bytes that were written; `payload` is what they mean."""

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
        """What keeps events together at their destination."""
        return self.ordering_key if self.ordering_key is not None else self.partition_key

    @property
    def address(self) -> str:
        """What stands behind the colon of the destination."""
        return self.destination.partition(":")[2]


class Publisher:
    """Subclass it and write `publish`."""

    whole_batches = False
    """True if `publish_many` takes all events or none, in one go: then the relay calls it with all that it has."""

    def publish(self, event: ClaimedEvent) -> None:
        """One attempt. Returns when the event has arrived."""
        raise NotImplementedError

    def publish_many(self, events: Sequence[ClaimedEvent]) -> None:
        """One attempt for all of them, in this order; if it raises none of them has arrived."""
        for event in events:
            self.publish(event)

    def close(self) -> None:
        """The relay has ended."""


class FunctionPublisher(Publisher):
    """Any function of one event."""

    def __init__(self, function: Callable[[ClaimedEvent], object]) -> None:
        self._function = function

    def publish(self, event: ClaimedEvent) -> None:
        self._function(event)


class StdoutPublisher(Publisher):
    """One JSON document on a line for each event."""

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
        else:  # as it was written, but on one line: in JSON a line ends only where a space could be, too
            written = msgspec.json.decode(event.data, type=msgspec.Raw)
            document["payload"] = msgspec.Raw(bytes(written).replace(b"\n", b" ").replace(b"\r", b" "))
        line = msgspec.json.encode(document).decode()
        with self._lock:
            print(line, file=self._stream or sys.stdout, flush=True)
