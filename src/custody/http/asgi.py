"""ASGI, the protocol between uvicorn and the application: its types, and sending an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from custody.http.answer import Answer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Client(Protocol):
    """The connection of a request, as a handler knows it."""

    @property
    def whole(self) -> bool:
        """Whether each request that has begun has arrived with its body."""

    @property
    def lost(self) -> bool:
        """Whether the client has disconnected."""

    watching: set[Callable[[], object]]
    """Called when the client disconnects."""

    def disregard_body(self) -> None:
        """Drops what comes of the body of the request that is being answered."""


async def send_answer(send: Send, answer: Answer) -> None:
    headers = [*answer.headers]
    if answer.status != 204:  # 204 has no body, so no length
        headers.append((b"content-length", str(len(answer.body)).encode()))
    if answer.body:
        headers.append((b"content-type", answer.content_type))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
