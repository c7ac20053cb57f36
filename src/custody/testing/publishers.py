"""The contract of a publisher as tests: subclass it in your test module and provide a `Destination`.

class TestMine(PublisherContract):
    @pytest.fixture
    def destination(self): ...   # a Destination: creates publishers, and shows what has arrived
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import uuid4

import pytest

from custody.errors import PublisherUnavailable
from custody.model.codec import encode
from custody.relay import ClaimedEvent, Publisher


@dataclass(frozen=True)
class Arrived:
    """One event at its destination. It may have more headers than the event; their names are case-insensitive."""

    event_id: str
    data: bytes
    headers: dict[str, str]


class Destination(Protocol):
    """The destination of a publisher, for the test."""

    def publisher(self) -> Publisher:
        """A publisher for this destination."""

    def name(self) -> str:
        """The value of `destination` in events."""

    def arrived(self) -> Sequence[Arrived]:
        """What has arrived so far, in order."""

    def refuse(self, times: int) -> None:
        """Makes the next `times` requests fail, without being down."""

    def attempts(self) -> int:
        """The number of requests so far, including failed ones."""

    def unreachable(self) -> Publisher | None:
        """A publisher whose destination is down; None if that cannot happen."""


def event(destination: str, payload: Any, **given: Any) -> ClaimedEvent:
    """An event as a relay passes it to a publisher."""
    kind, data = encode(payload)
    values: dict[str, Any] = {"id": 1, "event_id": uuid4(), "event_type": "tested", "destination": destination}
    values |= {"kind": kind.decode(), "data": data, "created_at": datetime.now(UTC)}
    return ClaimedEvent(**{**values, **given})


PAYLOADS = ({"n": 1, "text": "Grüße"}, [1, 2.5, None], "plain text, ünïcode", b"\x00\xff bytes", "", None)


class PublisherContract:
    """The contract of a publisher (requirement O9)."""

    @pytest.mark.parametrize("payload", PAYLOADS, ids=repr)
    def test_payload_and_headers_arrive_as_they_are(self, destination: Destination, payload: Any) -> None:
        publisher = destination.publisher()
        sent = event(destination.name(), payload, headers={"x-trace": "abc", "x-other": "1"}, partition_key="p")
        publisher.publish(sent)
        (arrived,) = destination.arrived()
        assert arrived.data == sent.data
        assert arrived.event_id == str(sent.event_id)
        named = {name.lower(): value for name, value in arrived.headers.items()}
        assert named.items() >= sent.headers.items()
        publisher.close()

    def test_events_arrive_in_the_order_of_the_calls(self, destination: Destination) -> None:
        publisher = destination.publisher()
        events = [event(destination.name(), n, ordering_key="k") for n in range(10)]
        for each in events:
            publisher.publish(each)
        assert [one.event_id for one in destination.arrived()] == [str(each.event_id) for each in events]
        publisher.close()

    def test_a_call_is_one_attempt(self, destination: Destination) -> None:
        """A failure is raised and not retried, because the relay does the retries."""
        publisher = destination.publisher()
        sent = event(destination.name(), 1)
        destination.refuse(1)
        before = destination.attempts()
        with pytest.raises(Exception):  # noqa: B017, PT011  # any will do
            publisher.publish(sent)
        assert destination.attempts() - before == 1
        assert destination.arrived() == []
        publisher.publish(sent)
        assert [one.event_id for one in destination.arrived()] == [str(sent.event_id)]
        publisher.close()

    def test_many_threads_may_use_it_at_once(self, destination: Destination) -> None:
        publisher = destination.publisher()
        events = [event(destination.name(), {"n": n, "fill": "x" * 200}) for n in range(100)]
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(publisher.publish, events))
        arrived = {one.event_id: one.data for one in destination.arrived()}
        assert arrived == {str(each.event_id): each.data for each in events}
        assert len(destination.arrived()) == len(events)
        publisher.close()

    def test_a_whole_batch_arrives_or_nothing_of_it(self, destination: Destination) -> None:
        publisher = destination.publisher()
        if not publisher.whole_batches:
            pytest.skip("it takes its events one by one")
        events = [event(destination.name(), n, ordering_key="k") for n in range(10)]
        destination.refuse(1)
        with pytest.raises(Exception):  # noqa: B017, PT011
            publisher.publish_many(events)
        assert destination.arrived() == []
        publisher.publish_many(events)
        assert [one.event_id for one in destination.arrived()] == [str(each.event_id) for each in events]
        publisher.close()

    def test_a_destination_that_is_down_is_told_from_a_failure(self, destination: Destination) -> None:
        publisher = destination.unreachable()
        if publisher is None:
            pytest.skip("it is always there")
        with pytest.raises(PublisherUnavailable):
            publisher.publish(event(destination.name(), 1))
        publisher.close()
