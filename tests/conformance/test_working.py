"""The worker and what wakes it, by either way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from uuid import UUID, uuid4

import pytest
from tests.conformance.conftest import BLOCKING
from tests.http.conftest import served
from tests.waiting import wait_for

import custody
from custody import Dead, Later, Message, Outgoing, Policy, Retry
from custody.errors import PayloadMismatch
from custody.worker import Worker, WorkerSummary

pytestmark = pytest.mark.core


@pytest.fixture(params=BLOCKING)
def c(request: pytest.FixtureRequest, database_url: str) -> Iterator[custody.Custody]:
    """By either way, with the real clock: workers wait."""
    with custody.connect(database_url, worker="test") as opened:
        if request.param == "direct":
            yield opened
            return
        with served(opened) as server, custody.connect(server.url, worker="test") as remote:
            yield remote


@contextmanager
def working(worker: Worker) -> Iterator[list[WorkerSummary]]:
    summaries: list[WorkerSummary] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            summaries.append(worker.run())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield summaries
    finally:
        worker.stop()
        thread.join(20)
        assert not thread.is_alive()
        assert not failed, failed


def test_a_worker_says_what_became_of_each(c: custody.Custody) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g", Policy(ordering="key", max_attempts=2, backoff=custody.Constant("10ms")))
    seen: list[tuple[str, int]] = []

    def handle(message: Message) -> None:
        seen.append((message.payload, message.attempt))
        if message.payload == "dead":
            raise Dead("no use")
        if message.payload == "retry":
            raise Retry("once more", after="1ms")
        if message.payload == "later" and len(seen) < 50 and ("later", 1) not in seen[:-1]:
            raise Later("1ms")

    names = ("fine", "dead", "retry", "later")
    with working(c.worker_for("orders", "g", handle)) as summaries:
        c.publish_many("orders", [Outgoing(name, key=name) for name in names])
        wait_for(lambda: c.stats("orders", "g").depth == 0, "everything is resolved")
    (summary,) = summaries
    assert (summary.done, summary.dead, summary.later, summary.lost) == (2, 2, 1, 0)
    assert {letter.payload: letter.reason for letter in c.dead("orders", "g")} == {
        "dead": "terminal",
        "retry": "max_retries_exceeded",
    }


@dataclass
class Order:
    id: UUID
    amount: Decimal


@pytest.mark.req("X12")
def test_typed_payloads_are_decoded_for_the_handler_and_what_does_not_fit_is_dead(c: custody.Custody) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    c.create_group("orders", "declared")
    order = Order(uuid4(), Decimal("1.10"))
    receipts = c.publish_many("orders", [order, {"id": str(order.id), "amount": [1]}])
    seen: list[Order] = []

    @custody.handler(payload=Order)
    async def handle(message: Message) -> None:
        seen.append(message.payload)

    with (
        working(c.worker_for("orders", "g", lambda message: seen.append(message.payload), payload=Order)),
        working(c.worker_for("orders", "declared", handle)),
    ):
        wait_for(lambda: all(c.stats("orders", group).depth == 0 for group in ("g", "declared")), "all are resolved")
    assert seen == [order, order]
    for group in ("g", "declared"):
        (letter,) = c.dead("orders", group)
        assert (letter.offset, letter.attempts, letter.reason) == (receipts[1].offset, 1, "terminal")
        assert letter.last_error == "the payload does not fit Order: $.amount: Expected `decimal`, got `array`"
    with pytest.raises(PayloadMismatch):
        c.read("orders", receipts[1].partition, offset=receipts[1].offset)[0].as_(Order)


def test_a_publish_wakes_a_worker_that_would_sleep_for_long(c: custody.Custody) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    handled: list[float] = []
    worker = c.worker_for("orders", "g", lambda _: handled.append(time.monotonic()), poll="1h")
    with working(worker):
        c.publish("orders", 0)
        wait_for(lambda: len(handled) == 1, "the first message was handled")
        wait_for(lambda: worker.waiting_for == "empty", "the worker sleeps")
        delays = []
        for n in range(2, 12):
            published = time.monotonic()
            c.publish("orders", n)
            wait_for(lambda n=n: len(handled) == n, "the message was handled")  # type: ignore[misc]
            delays.append(handled[-1] - published)
        assert sorted(delays)[5] < 0.5, delays


def test_listening_hears_of_its_topic_alone(c: custody.Custody) -> None:
    c.create_topic("orders")
    c.create_topic("other")
    heard = threading.Event()
    stop = c.listen("orders", heard.set)
    try:
        wait_for(heard.is_set, "it is told once that it may have missed something")
        heard.clear()
        c.publish("other", 1)
        c.publish("orders", 1)
        wait_for(heard.is_set, "the publish is heard of")
    finally:
        stop()


def test_work_ends_with_the_group(c: custody.Custody) -> None:
    c.create_topic("orders")
    c.create_group("orders", "g")
    worker = c.worker_for("orders", "g", lambda _: None, poll="10ms")
    caught: list[custody.CustodyError] = []

    def run() -> None:
        try:
            worker.run()
        except custody.CustodyError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: worker.waiting_for == "empty", "the worker has come to the group")
    c.delete_group("orders", "g")
    c.create_topic("again")  # the group is gone, the topic is there
    thread.join(20)
    assert [error.code for error in caught] == ["group_not_found"]


def test_events_of_an_outbox_elsewhere_arrive_once(c: custody.Custody) -> None:
    c.create_topic("orders", partitions=2)
    one, two = uuid4(), uuid4()
    first = [(one, 0, Outgoing({"n": 1}, key="a")), (two, 0, Outgoing(b"\xff", headers={"h": "v"}))]
    assert c.receive_events("orders", first) == 2
    assert c.receive_events("orders", first) == 0
    assert c.receive_events("orders", [(one, 1, Outgoing({"n": 1}, key="a"))]) == 1
    messages = c.read("orders", 0) + c.read("orders", 1)
    assert sorted(str(message.payload) for message in messages) == sorted([str(b"\xff"), "{'n': 1}", "{'n': 1}"])
    c.create_topic("stock")
    assert c.receive_events("stock", first) == 2, "an id is known within its topic"
    assert c.receive_events("orders", first, source="shop") == 2, "and its source"
    assert [c.receive_events("orders", first, source=source) for source in ("shop", "")] == [0, 0]
    c.delete_topic("stock")
    c.create_topic("stock")
    assert c.receive_events("stock", first) == 2, "another topic of the same name has none of them"
    with pytest.raises(custody.CustodyError) as refused:
        c.receive_events("nothing", first)
    assert refused.value.code == "topic_not_found"
