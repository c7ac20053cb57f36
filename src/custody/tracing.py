"""Tracing across the log: messages carry the W3C `traceparent` of their publisher.

Spans are those of OpenTelemetry. It need not be installed, and is used only if the program has imported it: otherwise
there is no current span. In a process that makes no spans, the trace of a request or message is still passed on.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from custody.model.entities import Message, Outgoing
from custody.model.outcomes import OUTCOMES, outcome_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MOST_LINKS = 128
_VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?\Z")

_passing: ContextVar[Mapping[str, str]] = ContextVar("custody_trace", default=MappingProxyType({}))
"""The trace headers of the request or message that is being handled, in a process that makes no spans."""


def _loaded() -> bool:
    return "opentelemetry.trace" in sys.modules


def active() -> bool:
    """Whether this process exports spans."""
    if not _loaded():
        return False
    from opentelemetry import trace

    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def carrier() -> Mapping[str, str]:
    """The headers of the current span; empty if there is none."""
    if not _loaded():
        return _passing.get()
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not trace.get_current_span().get_span_context().is_valid:
        return _passing.get()
    headers: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(headers)
    return headers


def traced(messages: Iterable[Outgoing]) -> list[Outgoing]:
    """Adds the current span to the headers of messages that have no trace yet."""
    found = carrier()
    if not found:
        return list(messages)
    return [
        message if _has(message.headers) else replace(message, headers={**(message.headers or {}), **found})
        for message in messages
    ]


def traced_each(messages: Sequence[tuple[str, Outgoing]]) -> Sequence[tuple[str, Outgoing]]:
    """`traced` for messages with their topics."""
    if not carrier():
        return messages
    topics = [topic for topic, _ in messages]
    return list(zip(topics, traced(message for _, message in messages), strict=True))


def carried(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Adds the current span to the headers of one message, unless they have a trace."""
    found = carrier()
    return {**(headers or {}), **found} if found and not _has(headers) else headers


def _has(headers: Mapping[str, str] | None) -> bool:
    return headers is not None and TRACEPARENT in headers


class Span(Protocol):
    """A span, or a stand-in; a context manager around the work."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def answered(self, status: int) -> None:
        """A request was answered."""

    def handled(self, raised: BaseException | None) -> None:
        """A handler returned, or raised."""


class _Passing:
    """No span: passes the received trace on to messages that are published meanwhile."""

    __slots__ = ("_came", "_token")

    def __init__(self, came: Mapping[str, str]) -> None:
        self._came = came
        self._token: Token[Mapping[str, str]] | None = None

    def __enter__(self) -> Self:
        if self._came:
            self._token = _passing.set(self._came)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._token is not None:
            _passing.reset(self._token)

    def answered(self, status: int) -> None:
        pass

    def handled(self, raised: BaseException | None) -> None:
        pass


_NOTHING = _Passing({})


class _Recording:
    """A span of OpenTelemetry, which is the current one while the context is open."""

    def __init__(self, name: str, kind: str, attributes: Mapping[str, Any], parent: Context | None = None) -> None:
        from opentelemetry import trace

        self._span = _tracer().start_span(
            name, context=parent, kind=getattr(trace.SpanKind, kind), attributes=attributes
        )
        self._current = trace.use_span(
            self._span, end_on_exit=True, record_exception=True, set_status_on_exception=True
        )

    def __enter__(self) -> Self:
        self._current.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current.__exit__(kind, error, trace)

    def answered(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500 and status != 503:  # 503 asks to try later: no fault
            self._fail(None)

    def handled(self, raised: BaseException | None) -> None:
        outcome = outcome_of(raised)
        self._span.set_attribute("custody.outcome", outcome.kind)
        if raised is not None and OUTCOMES[outcome.kind].failure:
            self._span.record_exception(raised)
            self._fail(outcome.error)

    def _fail(self, description: str | None) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, description))


@lru_cache(maxsize=1)
def _tracer() -> Tracer:
    from opentelemetry import trace

    return trace.get_tracer("custody")


def _came(headers: Mapping[str, str]) -> dict[str, str]:
    """The trace in these headers; empty if the traceparent is not valid."""
    parent = headers.get(TRACEPARENT)
    if parent is None or not _VALID.match(parent):
        return {}
    state = headers.get(TRACESTATE)
    return {TRACEPARENT: parent} if state is None else {TRACEPARENT: parent, TRACESTATE: state}


def _parent(headers: Mapping[str, str]) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(headers, context=Context())


def serving(method: str, route: str, headers: Mapping[bytes, bytes]) -> Span:
    """The span of a request at a server: a child of the span in its headers."""
    given = headers.get(b"traceparent")
    if given is None and not active():
        return _NOTHING
    found: dict[str, str] = {}
    if given is not None:
        found = {TRACEPARENT: given.decode("latin-1")}
        if (state := headers.get(b"tracestate")) is not None:
            found[TRACESTATE] = state.decode("latin-1")
    if not active():
        return _Passing(_came(found))
    attributes = {"http.request.method": method, "http.route": route}
    return _Recording(f"{method} {route}", "SERVER", attributes, _parent(found))


def publishing(topics: Iterable[str], count: int) -> Span:
    """The span of a publish, which its messages carry."""
    if not active():
        return _NOTHING
    wanted = set(topics)
    attributes: dict[str, Any] = {**_operation("publish", "send"), "messaging.batch.message_count": count}
    name = "publish"
    if len(wanted) == 1:
        (topic,) = wanted
        name, attributes["messaging.destination.name"] = f"publish {topic}", topic
    return _Recording(name, "PRODUCER", attributes)


def received(topic: str, group: str, messages: Iterable[Message], began_ns: int) -> None:
    """Records the span of a delivery that began at that time, with links to the spans that published the messages."""
    if not active():
        return
    from opentelemetry import trace

    found = list(messages)
    parents = dict.fromkeys(message.headers.get(TRACEPARENT) for message in found)
    contexts = [
        trace.get_current_span(_parent({TRACEPARENT: parent})).get_span_context() for parent in parents if parent
    ]
    links = [trace.Link(context) for context in contexts if context.is_valid]
    _tracer().start_span(
        f"receive {topic}",
        kind=trace.SpanKind.CONSUMER,
        attributes={
            **_operation("receive", "receive"),
            "messaging.destination.name": topic,
            "messaging.consumer.group.name": group,
            "messaging.batch.message_count": len(found),
        },
        links=links[:MOST_LINKS],
        start_time=began_ns,
    ).end()


def processing(message: Message, group: str) -> Span:
    """The span of a handler: a child of the span that published the message."""
    if not active():
        found = _came(message.headers) if message.headers else None
        return _Passing(found) if found else _NOTHING
    attributes = {
        **_operation("process", "process"),
        "messaging.destination.name": message.topic,
        "messaging.destination.partition.id": str(message.partition),
        "messaging.consumer.group.name": group,
        "messaging.message.id": f"{message.topic}/{message.partition}/{message.offset}",
        "custody.attempt": message.attempt,
    }
    return _Recording(f"process {message.topic}", "CONSUMER", attributes, _parent(message.headers))


def _operation(name: str, kind: str) -> dict[str, Any]:
    return {"messaging.system": "custody", "messaging.operation.name": name, "messaging.operation.type": kind}
