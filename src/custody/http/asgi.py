"""ASGI, the protocol between uvicorn and the application: its types, and sending an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from custody.http.answer import Answer

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


async def send_answer(send: Send, answer: Answer) -> None:
    headers = [*answer.headers]
    if answer.status != 204:  # 204 has no body, so no length
        headers.append((b"content-length", str(len(answer.body)).encode()))
    if answer.body:
        headers.append((b"content-type", answer.content_type))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
