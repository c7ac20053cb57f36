"""The ASGI application: checks origin and API key, calls the operation of the path, and logs the request."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Mapping
from functools import cache

from custody import tracing
from custody.errors import CustodyError, MethodNotAllowed, NoSuchPath
from custody.http import by_hand, derived, health, publishing, receiving, settling
from custody.http.answer import Answer
from custody.http.asgi import Message, Receive, Scope, Send, send_answer
from custody.http.call import Call
from custody.http.dispatch import answer, failed
from custody.http.logs import request_line
from custody.http.openapi import describe, page
from custody.http.operation import Operation, Table
from custody.http.origins import is_preflight, preflight, require_host, require_origin, shared
from custody.http.rights import ANYBODY, Caller
from custody.http.routes import Routes
from custody.http.state import ServerState
from custody.model.limits import NAME_LENGTH

access = logging.getLogger("custody.http.access")

NOT_KEPT = (b"cache-control", b"no-store")
"""A receive is a GET: a cache between server and client would give one lease to several clients."""
METHODS = ("GET", "POST", "PATCH", "DELETE")
PIECE = 64 * 1024
"""Bytes of an answer that are passed to the connection at a time."""
_ids = random.Random()
"""Of requests: they have to differ, and need not be hard to guess."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}\Z")
_WORKER = re.compile(rb"[\x21-\x7e]{1,%d}\Z" % NAME_LENGTH)

# the first operation that matches a path is called: names come before placeholders
OPERATIONS: list[Operation] = [
    operation for part in (publishing, settling, receiving, health) for operation in part.table.operations
] + derived.operations(by_hand.STEPS)


class Request:
    """What is known of a request before its body is read."""

    __slots__ = ("caller", "headers", "lasting", "request_id", "route", "worker")

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        given = headers.get(b"x-request-id", b"")
        self.headers = headers
        self.request_id = given.decode() if _REQUEST_ID.match(given) else f"{_ids.getrandbits(128):032x}"
        self.caller: Caller = ANYBODY
        self.worker = "http"
        self.route = "-"
        self.lasting = False
        """Whether the answer says itself for how long it may be kept."""


class Application:
    """The HTTP interface as an ASGI application. Its state is opened and closed with the server."""

    def __init__(self, state: ServerState) -> None:
        from custody.dashboard import site  # it imports modules of this package

        self._state = state
        self._routes = Routes([*OPERATIONS, *_documents()])
        self._serves, self._wants_page, self._dashboard = site.serves, site.wants_page, site.Dashboard(state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        self._state.open()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        self._dashboard.close()
        await self._state.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        request = Request(dict(scope["headers"]))
        status = 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *self._extra(request)]
                if scope["method"] != "HEAD":  # whose answer has no body to be sent with
                    scope["custody.connection"].hold_head()
            elif len(message.get("body", b"")) > PIECE:
                await self._in_pieces(send, message["body"])
                return
            await send(message)

        try:
            await send_answer(sending, await self._answer(scope, receive, request))
        finally:
            self._note(scope, request, status, time.perf_counter() - began)

    async def _in_pieces(self, send: Send, body: bytes) -> None:
        """Sends a large answer as fast as the client reads it, and counts it as buffered until then."""
        held = self._state.answers.hold(len(body))
        try:
            for start in range(0, len(body), PIECE):
                more = start + PIECE < len(body)
                await send({"type": "http.response.body", "body": body[start : start + PIECE], "more_body": more})
        finally:
            self._state.answers.give(held)

    async def _answer(self, scope: Scope, receive: Receive, request: Request) -> Answer:
        if is_preflight(scope["method"], request.headers):
            return self._preflight(scope, request)
        if self._serves(scope["path"]):
            return await self._page(scope, receive, request)
        if scope["path"] == "/" and self._wants_page(request.headers):
            return Answer(b"", 303, ((b"location", b"/ui"),))
        found = self._routes.find(scope["method"], scope["path"])
        others = self._routes.at(scope["path"]) if found is None else [found[0]]
        refused = await self._refused(scope, request, open=bool(others) and all(other.open for other in others))
        if refused is not None:
            return refused
        if found is None:
            return _unknown(scope, request, sorted({other.method for other in others}, key=METHODS.index))
        operation, params = found
        request.route = operation.path
        with tracing.serving(operation.method, operation.path, request.headers) as span:
            answered = await answer(
                self._state,
                operation,
                params=params,
                query_string=scope["query_string"],
                headers=request.headers,
                receive=receive,
                client=scope["custody.connection"],
                caller=request.caller,
                worker=request.worker,
                request_id=request.request_id,
            )
            span.answered(answered.status)
        return answered

    async def _page(self, scope: Scope, receive: Receive, request: Request) -> Answer:
        """A page of the dashboard, which has its own login, and pages for errors."""
        answered = await self._dashboard.answer(scope, receive, request.headers, request.request_id)
        request.route, request.caller, request.lasting = answered.route, answered.caller, answered.lasting
        return answered.answer

    async def _refused(self, scope: Scope, request: Request, *, open: bool) -> Answer | None:
        """The answer to a caller that is refused; None if it may go on. An `open` operation needs no key."""
        settings = self._state.settings
        try:
            require_origin(request.headers, scope.get("scheme", "http"), settings, open=open)
            # monitoring has to work just when the database cannot be reached
            stale = scope["path"] == "/metrics"
            request.caller = await self._state.authenticate(request.headers, open=open, stale=stale)
            if not self._state.keys.needed:
                require_host(request.headers, settings)
        except CustodyError as error:
            return failed(error, request.request_id)
        if not open:
            scope["custody.connection"].trust()
        named = request.headers.get(b"x-custody-worker", b"")
        if request.caller.name is not None:  # so that nobody can act under the name of another key in the journal
            request.worker = request.caller.name
        if _WORKER.match(named):
            own = named.decode()
            request.worker = own if request.caller.name is None else f"{request.caller.name}/{own}"
        return None

    def _preflight(self, scope: Scope, request: Request) -> Answer:
        """The answer to a browser's CORS preflight, which carries no key."""
        request.route = "preflight"
        try:
            require_origin(request.headers, scope.get("scheme", "http"), self._state.settings, open=False)
        except CustodyError as error:
            return failed(error, request.request_id)
        return preflight(request.headers, self._state.settings)

    def _extra(self, request: Request) -> list[tuple[bytes, bytes]]:
        return [
            (b"x-request-id", request.request_id.encode()),
            *(() if request.lasting else (NOT_KEPT,)),
            *shared(request.headers, self._state.settings),
        ]

    def _note(self, scope: Scope, request: Request, status: int, took: float) -> None:
        self._state.observe(scope["method"], request.route, status, took)
        if access.isEnabledFor(logging.INFO):
            request_line(
                access,
                {
                    "request_id": request.request_id,
                    "method": scope["method"],
                    "route": request.route,
                    "status": status,
                    "ms": round(took * 1000, 3),
                    "key": request.caller.name,
                    "client": (scope.get("client") or ("-",))[0],
                },
            )


def _documents() -> list[Operation]:
    """The operations that serve the API description. They are not part of it."""
    table = Table("documents")

    @table.operation("GET", "/openapi.json", answer=None, open=True)
    async def openapi(_call: Call) -> Answer:
        return Answer(_openapi())

    @table.operation("GET", "/docs", answer=None, open=True)
    async def docs(_call: Call) -> Answer:
        return Answer(_page(), content_type=b"text/html; charset=utf-8")

    return table.operations


@cache  # made on the first request, because it takes as long as the rest of a start
def _openapi() -> bytes:
    return describe(OPERATIONS)


@cache
def _page() -> bytes:
    return page(OPERATIONS).encode()


def _unknown(scope: Scope, request: Request, methods: list[str]) -> Answer:
    """The answer to an unknown path (no methods), or to a method that the path does not have."""
    path = scope["path"]
    if not methods:
        return failed(NoSuchPath(f"there is nothing at {path}", "See /docs for the list of calls."), request.request_id)
    refused = failed(MethodNotAllowed(f"{scope['method']} is not for {path}"), request.request_id)
    return Answer(refused.body, refused.status, ((b"allow", ", ".join(methods).encode()),))
