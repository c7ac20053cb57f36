"""The application: FastAPI with a route for each operation, behind the middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from custody.errors import MethodNotAllowed, NoSuchPath
from custody.http import groups, inspecting, producers, publishing, receiving, settling, topics
from custody.http.answer import Answer
from custody.http.dispatch import failed
from custody.http.middleware import Middleware
from custody.http.openapi import describe, page
from custody.http.operation import Operation
from custody.http.state import State

# where one path fits two operations, the first counts: names before placeholders
OPERATIONS: list[Operation] = [
    operation
    for part in (publishing, settling, receiving, topics, groups, producers, inspecting)
    for operation in part.table.operations
]


def application(state: State) -> Middleware:
    """The whole door on an open state; it is opened and closed with the server."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        state.open()
        try:
            yield
        finally:
            await state.close()

    app = FastAPI(
        title="Custody",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        # spans are the middleware's: FastAPI does not see the calls that messages travel by
        telemetry={"tracing": False, "metrics": False, "logs": False, "operation_spans": False},
    )
    app.router.redirect_slashes = False  # a path is right or wrong
    middleware = Middleware(app, state, OPERATIONS)
    for operation in OPERATIONS:
        app.add_api_route(
            # a producer's id may be any text, a slash included
            operation.path.replace("{producer_id}", "{producer_id:path}"),
            _endpoint(middleware, operation),
            methods=[operation.method],
            name=operation.name,
            response_model=None,
            include_in_schema=False,  # FastAPI would describe none of it: bodies are read by msgspec
        )
    document, html = describe(OPERATIONS), page(OPERATIONS)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(html, media_type="text/html")

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _response(_unknown(request, error))

    return middleware


def _endpoint(middleware: Middleware, operation: Operation) -> Any:
    async def endpoint(request: Request) -> Response:
        return _response(await middleware.perform(operation, request.scope, request.receive, request.path_params))

    return endpoint


def _response(answer: Answer) -> Response:
    response = Response(answer.body, answer.status, media_type=answer.content_type.decode() if answer.body else None)
    for name, value in answer.headers:
        response.headers.append(name.decode(), value.decode())
    return response


_PATHS = [(compile_path(operation.path)[0], operation.method) for operation in OPERATIONS]


def _methods(path: str) -> list[str]:
    """What a path can be called with."""
    return list(dict.fromkeys(method for pattern, method in _PATHS if pattern.match(path))) or ["GET"]


def _unknown(request: Request, error: HTTPException) -> Answer:
    request_id = request.scope["custody"].request_id
    if error.status_code == 405:
        answer = failed(MethodNotAllowed(f"{request.method} is not for {request.url.path}"), request_id)
        return Answer(answer.body, answer.status, ((b"allow", ", ".join(_methods(request.scope["path"])).encode()),))
    return failed(NoSuchPath(f"there is nothing at {request.url.path}", "See /docs for what there is."), request_id)
