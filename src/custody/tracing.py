"""Traces that do not end at the log: messages carry the W3C `traceparent` of whoever published them.

Spans are OpenTelemetry's. It need not be installed, and is not imported here before somebody else has: without that
there is no span to carry. Where nobody makes spans, what comes with a request or a message is passed on all the same.
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
from custody.model.outcomes import outcome_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MOST_LINKS = 128
_VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?\Z")

_passing: ContextVar[Mapping[str, str]] = ContextVar("custody_trace", default=MappingProxyType({}))
"""What came with the request or message that is being handled, where nobody makes spans."""


def _loaded() -> bool:
    return "opentelemetry.trace" in sys.modules


def active() -> bool:
    """Whether spans of this process go anywhere."""
    if not _loaded():
        return False
    from opentelemetry import trace

    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def carrier() -> Mapping[str, str]:
    """The headers that carry the current span; none if there is none."""
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
    """The messages with the current span in their headers, but for those that have one already."""
    found = carrier()
    if not found:
        return list(messages)
    return [
        message if _has(message.headers) else replace(message, headers={**(message.headers or {}), **found})
        for message in messages
    ]


def traced_each(messages: Sequence[tuple[str, Outgoing]]) -> Sequence[tuple[str, Outgoing]]:
    """The same for messages with their topics."""
    if not carrier():
        return messages
    topics = [topic for topic, _ in messages]
    return list(zip(topics, traced(message for _, message in messages), strict=True))


def carried(headers: Mapping[str, str] | None) -> Mapping[str, str] | None:
    """The headers of one message with the current span, unless they have one."""
    found = carrier()
    return {**(headers or {}), **found} if found and not _has(headers) else headers


def _has(headers: Mapping[str, str] | None) -> bool:
    return headers is not None and TRACEPARENT in headers


class Span(Protocol):
    """What is being done, from `with` to its end."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def answered(self, status: int) -> None:
        """A request was answered."""

    def handled(self, raised: BaseException | None) -> None:
        """A handler returned, or raised."""


class _Passing:
    """No span: what came from elsewhere is passed on to what is published meanwhile."""

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
    """A span of OpenTelemetry, which is the current one meanwhile."""

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
        if status >= 500 and status != 503:  # not now, says that one, and nothing is broken
            self._fail(None)

    def handled(self, raised: BaseException | None) -> None:
        outcome = outcome_of(raised)
        self._span.set_attribute("custody.outcome", outcome.kind)
        if raised is not None and outcome.kind != "later":  # put off is no failure
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
    """What of these headers is a trace; what is no valid traceparent is not passed on."""
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
    """A request of a server, a child of what its headers name."""
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
    """A publish: what it publishes carries this span."""
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
    """Messages were handed out, since that time: a span with links to those who published them."""
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
    """A handler's work on a message, a child of the span that published it."""
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
