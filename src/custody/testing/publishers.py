"""What every publisher has to do, as tests: subclass the contract in a test module of yours and say how to look.

class TestMine(PublisherContract):
    @pytest.fixture
    def destination(self): ...   # a Destination: makes publishers, and shows what has arrived
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
    """One event at its destination. There may be more headers than the event's own; names in any case."""

    event_id: str
    data: bytes
    headers: dict[str, str]


class Destination(Protocol):
    """Where a publisher publishes to, as the test sees it."""

    def publisher(self) -> Publisher:
        """A publisher that reaches it."""

    def name(self) -> str:
        """The destination that events have."""

    def arrived(self) -> Sequence[Arrived]:
        """What has arrived so far, in order."""

    def refuse(self, times: int) -> None:
        """Makes it fail that often from now on, and not be down."""

    def attempts(self) -> int:
        """How many requests have come in all, failed ones included."""

    def unreachable(self) -> Publisher | None:
        """A publisher whose destination is down; None if there is no such thing."""


def event(destination: str, payload: Any, **given: Any) -> ClaimedEvent:
    """An event as a relay would hand it over."""
    kind, data = encode(payload)
    values: dict[str, Any] = {"id": 1, "event_id": uuid4(), "event_type": "tested", "destination": destination}
    values |= {"kind": kind.decode(), "data": data, "created_at": datetime.now(UTC)}
    return ClaimedEvent(**{**values, **given})


PAYLOADS = ({"n": 1, "text": "Grüße"}, [1, 2.5, None], "plain text, ünïcode", b"\x00\xff bytes", "", None)


class PublisherContract:
    """The promises of a publisher (requirement O9)."""

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
        """A failure is raised, not repeated: how often and when is the relay's business."""
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
