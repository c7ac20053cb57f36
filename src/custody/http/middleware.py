"""Before everything else: who may come in, under which number, and what is written down about it.

The calls that messages travel by do not pass through FastAPI's router: it took half of the time of such a request.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from custody import tracing
from custody.errors import CustodyError
from custody.http.answer import Answer
from custody.http.dispatch import answer, failed
from custody.http.operation import Operation
from custody.http.origins import is_preflight, preflight, require_host, require_origin, shared
from custody.http.rights import ANYBODY, Caller
from custody.http.state import State

access = logging.getLogger("custody.http.access")

NOT_KEPT = (b"cache-control", b"no-store")
"""A receive is a GET: something in between that kept its answer would give one lease to many."""
PIECE = 64 * 1024
"""So much of an answer is given to the connection at a time."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")
_WORKER = re.compile(rb"[\x21-\x7e]{1,200}\Z")


class Request:
    """What is known of a request before it is read."""

    __slots__ = ("caller", "headers", "request_id", "route", "worker")

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        given = headers.get(b"x-request-id", b"")
        self.headers = headers
        self.request_id = given.decode() if _REQUEST_ID.match(given) else uuid.uuid4().hex
        self.caller: Caller = ANYBODY
        self.worker = "http"
        self.route = "-"


class Middleware:
    """An ASGI application around the one of FastAPI."""

    def __init__(self, inner: ASGIApp, state: State, operations: list[Operation]) -> None:
        self._inner, self._state = inner, state
        self._exact = {
            (operation.method, operation.path): operation for operation in operations if "{" not in operation.path
        }
        by_path = {(operation.method, operation.path): operation for operation in operations}
        self._receive_any = by_path[("GET", "/messages/{topic}")]
        self._receive_one = by_path[("GET", "/messages/{topic}/{partition}")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._inner(scope, receive, send)
            return
        began = time.perf_counter()
        request = Request(dict(scope["headers"]))
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *self._extra(request)]
            elif len(message.get("body", b"")) > PIECE:
                await self._in_pieces(send, message["body"])
                return
            await send(message)

        scope["custody"] = request
        try:
            if is_preflight(scope["method"], request.headers):
                await _send(sending, self._preflight(scope, request))
                return
            found = self._operation(scope)
            if found is not None and (refused := await self._refused(scope, request, found[0])) is not None:
                await _send(sending, refused)
            elif found is not None:
                operation, params = found
                request.route = operation.path
                await _send(sending, await self.perform(operation, scope, receive, params))
            elif (refused := await self._refused(scope, request, None)) is not None:
                await _send(sending, refused)
            else:
                await self._inner(scope, receive, sending)
        finally:
            self._note(scope, request, status, time.perf_counter() - began)

    async def _in_pieces(self, send: Send, body: bytes) -> None:
        """A large answer goes out as fast as the client takes it, and is counted meanwhile."""
        held = self._state.answers.hold(len(body))
        try:
            for start in range(0, len(body), PIECE):
                more = start + PIECE < len(body)
                await send({"type": "http.response.body", "body": body[start : start + PIECE], "more_body": more})
        finally:
            self._state.answers.give(held)

    def _operation(self, scope: Scope) -> tuple[Operation, dict[str, str]] | None:
        """The operation of a path that is looked up at a glance; the others are FastAPI's to find."""
        method, path = scope["method"], scope["path"]
        operation = self._exact.get((method, path))
        if operation is not None:
            return operation, {}
        if method == "GET" and path.startswith("/messages/"):
            topic, slash, partition = path[10:].partition("/")
            if topic and not slash:
                return self._receive_any, {"topic": topic}
            if topic and partition and "/" not in partition:
                return self._receive_one, {"topic": topic, "partition": partition}
        return None

    async def perform(self, operation: Operation, scope: Scope, receive: Receive, params: Mapping[str, str]) -> Answer:
        request: Request = scope["custody"]
        request.route = operation.path
        with tracing.serving(operation.method, operation.path, request.headers) as span:
            answered = await answer(
                self._state,
                operation,
                params=params,
                query_string=scope["query_string"],
                headers=request.headers,
                receive=receive,
                caller=request.caller,
                worker=request.worker,
                request_id=request.request_id,
            )
            span.answered(answered.status)
        return answered

    async def _refused(self, scope: Scope, request: Request, operation: Operation | None) -> Answer | None:
        """The answer to whoever may not come in; None lets it pass."""
        settings = self._state.settings
        open = operation.open if operation is not None else is_open(scope["path"])
        try:
            require_origin(request.headers, scope.get("scheme", "http"), settings, open=open)
            # whoever watches the server wants to hear of it just when the database is away
            stale = scope["path"] == "/metrics"
            request.caller = await self._state.authenticate(request.headers, open=open, stale=stale)
            if not self._state.keys.needed:
                require_host(request.headers, settings)
        except CustodyError as error:
            return failed(error, request.request_id)
        if not open:
            scope["custody.connection"].trust()
        named = request.headers.get(b"x-custody-worker", b"")
        if request.caller.name is not None:  # in the journal nobody goes under the name of another key
            request.worker = request.caller.name
        if _WORKER.match(named):
            own = named.decode()
            request.worker = own if request.caller.name is None else f"{request.caller.name}/{own}"
        return None

    def _preflight(self, scope: Scope, request: Request) -> Answer:
        """The answer to a browser that asks whether a page may call. It shows no key for that."""
        request.route = "preflight"
        try:
            require_origin(request.headers, scope.get("scheme", "http"), self._state.settings, open=False)
        except CustodyError as error:
            return failed(error, request.request_id)
        return preflight(request.headers, self._state.settings)

    def _extra(self, request: Request) -> list[tuple[bytes, bytes]]:
        return [
            (b"x-request-id", request.request_id.encode()),
            NOT_KEPT,
            *shared(request.headers, self._state.settings),
        ]

    def _note(self, scope: Scope, request: Request, status: int, took: float) -> None:
        self._state.observe(scope["method"], request.route, status, took)
        if access.isEnabledFor(logging.INFO):
            access.info(
                "request",
                extra={
                    "custody": {
                        "request_id": request.request_id,
                        "method": scope["method"],
                        "route": request.route,
                        "status": status,
                        "ms": round(took * 1000, 3),
                        "key": request.caller.name,
                        "client": (scope.get("client") or ("-",))[0],
                    }
                },
            )


OPEN_PATHS = ("/openapi.json", "/docs", "/healthz", "/readyz")


def is_open(path: str) -> bool:
    """What is shown to whoever asks: nothing in it is anybody's."""
    return path in OPEN_PATHS


async def _send(send: Send, answer: Answer) -> None:
    headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
    if answer.body:
        headers.append((b"content-type", answer.content_type))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
