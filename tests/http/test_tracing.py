"""One trace from the publisher over the server and the log to the handler; and all of it without OpenTelemetry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import psycopg
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.http.conftest import Http, Process
from tests.waiting import wait_for

import custody
from custody import Dead, Later, Outgoing, Policy
from custody.engine.server_verbs import ServerVerbs
from custody.model.entities import Message
from custody.outbox import write

pytestmark = [pytest.mark.core, pytest.mark.req("G18")]

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = 0x0AF7651916CD43DD8448EB211C80319C


@lru_cache(maxsize=1)
def exporter() -> InMemorySpanExporter:
    """There is one for the process: OpenTelemetry can be set up once."""
    made, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    trace.set_tracer_provider(provider)
    return made


@pytest.fixture(scope="module", autouse=True)
def _no_spans_afterwards() -> Iterator[None]:
    """Later tests of this process publish messages without a trace again. OpenTelemetry has no other way to end it."""
    yield
    trace._TRACER_PROVIDER = None


class Spans:
    def all(self) -> list[ReadableSpan]:
        return list(exporter().get_finished_spans())

    def named(self, name: str) -> ReadableSpan:
        return wait_for(
            lambda: next((span for span in self.all() if span.name == name), None),
            lambda: f"there is no span {name!r}, only {[span.name for span in self.all()]}",
        )


@pytest.fixture
def spans() -> Iterator[Spans]:
    exporter().clear()
    yield Spans()
    exporter().clear()


@pytest.fixture
def orders(c: custody.Custody) -> custody.Custody:
    c.create_topic("orders")
    c.create_group("orders", "g", Policy(max_attempts=1))
    return c


@contextmanager
def span(name: str = "publisher") -> Iterator[trace.SpanContext]:
    exporter()  # else spans would go nowhere, and would not be valid
    with trace.get_tracer("test").start_as_current_span(name) as made:
        yield made.get_span_context()


def header(context: trace.SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def ids(found: ReadableSpan) -> tuple[int, int]:
    assert found.context is not None
    return found.context.trace_id, found.context.span_id


def parent_of(found: ReadableSpan) -> int | None:
    return None if found.parent is None else found.parent.span_id


def worked(c: custody.Custody, handler: Callable[[Message], object], count: int) -> None:
    """Runs a worker until it has handled so many."""
    seen: list[Message] = []

    def counting(message: Message) -> object:
        seen.append(message)
        return handler(message)

    worker = c.worker_for("orders", "g", counting, concurrency=1, poll="50ms")
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        wait_for(lambda: len(seen) >= count, "the worker has handled them")
    finally:
        worker.stop()
        thread.join(20)


def test_one_trace_goes_from_the_publisher_over_the_server_and_the_log_to_the_handler(
    orders: custody.Custody, http_: Http, spans: Spans
) -> None:
    within: list[trace.SpanContext] = []
    with span() as publisher:
        answer = http_.post("/messages", {"topic": "orders", "payload": 1}, headers={"traceparent": header(publisher)})
    assert answer.status == 200
    worked(orders, lambda _: within.append(trace.get_current_span().get_span_context()), 1)
    server, producer, consumer = (spans.named(name) for name in ("POST /messages", "publish orders", "process orders"))
    assert {ids(one)[0] for one in (server, producer, consumer)} == {publisher.trace_id}
    assert parent_of(server) == publisher.span_id
    assert parent_of(producer) == ids(server)[1]
    assert parent_of(consumer) == ids(producer)[1], "through the header of the message"
    assert [context.span_id for context in within] == [ids(consumer)[1]], "the current one in the handler"
    assert (server.kind, producer.kind, consumer.kind) == (SpanKind.SERVER, SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(server.attributes or {}) == {
        "http.request.method": "POST",
        "http.route": "/messages",
        "http.response.status_code": 200,
    }
    assert dict(producer.attributes or {}) == {
        "messaging.system": "custody",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.batch.message_count": 1,
    }
    assert dict(consumer.attributes or {}) == {
        "messaging.system": "custody",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "messaging.consumer.group.name": "g",
        "messaging.message.id": "orders/0/0",
        "custody.attempt": 1,
        "custody.outcome": "ack",
    }


def test_a_receive_has_links_to_those_who_published(orders: custody.Custody, http_: Http, spans: Spans) -> None:
    publishers = []
    for n in range(2):
        with span() as publisher:
            orders.publish_many("orders", [n, n])
            publishers.append((publisher.trace_id, publisher.span_id))
    orders.publish("orders", "by nobody")
    orders.publish("orders", "by a liar", headers={"traceparent": "00-what"})
    assert len(http_.get("/messages/orders?max=10&group=g").json["messages"]) == 6
    received = spans.named("receive orders")
    assert received.kind == SpanKind.CONSUMER
    assert [(link.context.trace_id, link.context.span_id) for link in received.links] == publishers
    assert (received.attributes or {})["messaging.batch.message_count"] == 6
    assert parent_of(received) == ids(spans.named("GET /messages/{topic}"))[1]
    exporter().clear()
    assert http_.get("/messages/orders?group=g").json["messages"] == []
    spans.named("GET /messages/{topic}")
    assert not [one for one in spans.all() if one.name == "receive orders"], "nothing was received"


def test_every_way_of_publishing_carries_the_current_span(orders: custody.Custody, db: psycopg.Connection[Any]) -> None:
    producer = orders.init_producer("p")
    with span() as publisher:
        orders.publish("orders", "one", headers={"mine": "stays"})
        orders.publish_many("orders", list(range(70)))  # by COPY
        orders.publish_delayed("orders", [Outgoing("delayed", delay="1s")])
        producer.publish("orders", "idempotent")
        with db.transaction():
            write(db, event_type="made", payload="outbox", destination="orders", headers={"mine": "stays"})
        transaction = producer.transaction()
        transaction.publish("orders", "in a transaction")
    transaction.commit()  # the span has ended meanwhile
    ServerVerbs(orders).move_outbox()
    read = orders.read("orders", max_messages=1000)
    waiting = orders.delayed("orders")
    assert len(read) == 74
    assert {message.headers.get("traceparent") for message in (*read, *waiting)} == {header(publisher)}
    assert [message.headers["mine"] for message in read if message.payload in ("one", "outbox")] == ["stays"] * 2


def test_the_client_carries_the_current_span(orders: custody.Custody, http_: Http, spans: Spans) -> None:
    with custody.connect(http_.url) as remote, span() as publisher:
        remote.publish("orders", "one")
        remote.publish_many("orders", list(range(3)))
        remote.publish_delayed("orders", [Outgoing("delayed", delay="1s")])
        with remote.init_producer("p").transaction() as transaction:
            transaction.publish("orders", "in a transaction")
    found = [*orders.read("orders"), *orders.delayed("orders")]
    assert len(found) == 6
    assert {message.headers.get("traceparent") for message in found} == {header(publisher)}


def test_the_calls_of_a_client_are_children_of_the_current_span(
    orders: custody.Custody, http_: Http, spans: Spans
) -> None:
    with custody.connect(http_.url) as remote, span() as caller:
        remote.publish("orders", 1)
        remote.claim("orders", "g").ack()
        remote.stats("orders", "g")
        remote.pause("orders", "g")
    for name in (
        "POST /messages",
        "GET /messages/{topic}",
        "POST /messages/ack",
        "GET /topics/{topic}/groups/{group}/stats",
        "POST /topics/{topic}/groups/{group}/pause",
    ):
        assert parent_of(spans.named(name)) == caller.span_id, name
    assert parent_of(spans.named("GET /healthz")) is None


def test_messages_keep_the_trace_that_they_have(orders: custody.Custody) -> None:
    with span():
        orders.publish("orders", 1, headers={"traceparent": PARENT})
    assert orders.read("orders")[0].headers == {"traceparent": PARENT}


def test_without_a_span_nothing_is_added(orders: custody.Custody, http_: Http) -> None:
    orders.publish("orders", 1)
    assert orders.read("orders")[0].headers == {}


def test_the_state_of_the_trace_goes_along(orders: custody.Custody, http_: Http, spans: Spans) -> None:
    headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
    http_.post("/messages", {"topic": "orders", "payload": 1}, headers=headers)
    found = orders.read("orders")[0].headers
    assert found["traceparent"].split("-")[1] == f"{TRACE_ID:032x}"
    assert found["traceparent"] != PARENT, "it names the span of the publish"
    assert found["tracestate"] == "vendor=1"


def test_messages_of_a_batch_and_of_a_transaction_over_http_carry_it(
    orders: custody.Custody, http_: Http, spans: Spans
) -> None:
    orders.create_topic("invoices")
    headers = {"traceparent": PARENT}
    many = [{"topic": topic, "payload": 1} for topic in ("orders", "invoices")]
    assert http_.post("/messages", {"messages": many}, headers=headers).status == 200
    large = {"topic": "orders", "messages": [{"payload": n} for n in range(200)]}
    assert http_.post("/messages", large, headers=headers).status == 200
    http_.post("/producers/init", {"producer_id": "p"})
    begun = http_.post("/transactions/begin", {"producer_id": "p", "epoch": 1}).json["transaction_id"]
    added = {"topic": "orders", "payload": 1, "transaction_id": begun}
    assert http_.post("/messages", added, headers=headers).status == 202
    assert http_.post("/transactions/commit", {"transaction_id": begun}).status == 200
    found = [*orders.read("orders", max_messages=1000), *orders.read("invoices")]
    assert len(found) == 203
    assert {message.headers["traceparent"].split("-")[1] for message in found} == {f"{TRACE_ID:032x}"}
    joint = spans.named("publish")
    assert "messaging.destination.name" not in (joint.attributes or {}), "there are two"


@pytest.mark.parametrize(
    ("raised", "outcome", "failed"),
    [(ValueError("bad"), "nack", True), (Dead("hopeless"), "dead", True), (Later("1h"), "later", False)],
)
def test_a_failure_of_the_handler_is_in_its_span(
    orders: custody.Custody, spans: Spans, raised: Exception, outcome: str, failed: bool
) -> None:
    orders.publish("orders", 1)

    def handle(message: Message) -> None:
        raise raised

    worked(orders, handle, 1)
    found = spans.named("process orders")
    assert (found.attributes or {})["custody.outcome"] == outcome
    assert (found.status.status_code is StatusCode.ERROR) == failed
    assert [event.name for event in found.events] == (["exception"] if failed else [])


def test_a_coroutine_has_the_span_too(orders: custody.Custody, spans: Spans) -> None:
    with span() as publisher:
        orders.publish("orders", 1)
    within: list[int] = []
    handled = threading.Event()

    async def handle(message: Message) -> None:
        within.append(trace.get_current_span().get_span_context().trace_id)
        handled.set()

    worker = orders.worker_for("orders", "g", handle, poll="50ms")
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert handled.wait(20)
    worker.stop()
    thread.join(20)
    assert within == [publisher.trace_id]


def test_an_error_of_the_server_is_in_its_span(
    orders: custody.Custody, http_: Http, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert http_.get("/topics/none").status == 404
    assert spans.named("GET /topics/{topic}").status.status_code is StatusCode.UNSET, "the caller's mistake"
    assert [one.name for one in spans.all() if one.kind is SpanKind.SERVER] == ["GET /topics/{topic}"]

    orders.pause("orders", "g")
    assert http_.get("/messages/orders?group=g").status == 503
    assert spans.named("GET /messages/{topic}").status.status_code is StatusCode.UNSET, "a pause is no failure"

    def broken(self: custody.Custody) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(custody.Custody, "ping", broken)
    assert http_.get("/readyz").status == 500
    assert spans.named("GET /readyz").status.status_code is StatusCode.ERROR


BLOCKED = """
    import sys
    sys.modules["opentelemetry"] = None  # as if it were not installed
    import json, threading, custody

    with custody.connect(sys.argv[1]) as c:
        c.publish("orders", 0)
        c.publish("orders", 1, headers={"traceparent": "PARENT", "tracestate": "vendor=1"})
        c.publish("orders", 2, headers={"traceparent": "00-what"})
        done = threading.Semaphore(0)

        def handle(message):
            c.publish("results", message.offset)
            done.release()

        worker = c.worker_for("orders", "g", handle, concurrency=1, poll="50ms")
        thread = threading.Thread(target=worker.run)
        thread.start()
        for _ in range(3):
            done.acquire()
        worker.stop()
        thread.join()
        print(json.dumps([one.headers for one in c.read("results")]))
"""


def test_without_opentelemetry_everything_works_and_a_trace_is_passed_on(
    orders: custody.Custody, database_url: str
) -> None:
    orders.create_topic("results")
    program = textwrap.dedent(BLOCKED).replace("PARENT", PARENT)
    done = subprocess.run(
        [sys.executable, "-c", program, database_url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    carried = {"traceparent": PARENT, "tracestate": "vendor=1"}
    assert json.loads(done.stdout) == [{}, carried, {}], "what a handler publishes belongs to its message's trace"


def test_a_server_that_makes_no_spans_passes_a_trace_on(
    orders: custody.Custody, process: Callable[..., Process]
) -> None:
    server = process()
    carried = {"traceparent": PARENT, "tracestate": "vendor=1"}
    for headers in (carried, {"traceparent": "00-what", "tracestate": "vendor=1"}, {}):
        assert server.http.post("/messages", {"topic": "orders", "payload": 1}, headers=headers).status == 200
    assert [message.headers for message in orders.read("orders")] == [carried, {}, {}]
    assert len(server.http.get("/messages/orders?group=g&max=3").json["messages"]) == 3


def test_custody_does_not_import_opentelemetry_by_itself() -> None:
    program = (
        "import sys, custody, custody.worker; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_environment_switches_spans_on_for_a_server(
    orders: custody.Custody, process: Callable[..., Process]
) -> None:
    server = process(environment={"OTEL_TRACES_EXPORTER": "console", "OTEL_SERVICE_NAME": "shop"})
    server.http.post("/messages", {"topic": "orders", "payload": 1}, headers={"traceparent": PARENT})
    assert server.stop() == 0
    assert server.popen.stdout is not None
    printed = server.popen.stdout.read().decode()
    assert '"name": "POST /messages"' in printed
    assert '"name": "publish orders"' in printed
    assert f"0x{TRACE_ID:032x}" in printed
    assert '"service.name": "shop"' in printed


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "opentelemetry-exporter-otlp"),
        ({"OTEL_TRACES_EXPORTER": "carrier-pigeon"}, "carrier-pigeon"),
    ],
)
def test_an_exporter_that_is_missing_is_told_and_the_server_runs(
    orders: custody.Custody, process: Callable[..., Process], environment: dict[str, str], said: str
) -> None:
    server = process(environment=environment)
    assert server.http.post("/messages", {"topic": "orders", "payload": 1}).status == 200
    assert server.stop() == 0
    assert said in server.log.read_text()
    assert os.environ.get("OTEL_TRACES_EXPORTER") is None, "the test's own environment is clean"
