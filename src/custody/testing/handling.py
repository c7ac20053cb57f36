"""Calls a handler as a worker does: a function or a coroutine function, with a typed payload if it wants one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import msgspec

from custody.handlers import is_coroutine_function, payload_of, require_finished
from custody.model.entities import Message


class Handling:
    """A handler, called in this thread. A context manager: it has a loop for coroutines."""

    def __init__(self, handler: Callable[[Message], Any]) -> None:
        self._handler, self._payload = handler, payload_of(handler)
        self._loop = asyncio.new_event_loop() if is_coroutine_function(handler) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._loop is not None:
            self._loop.close()

    def __call__(self, message: Message) -> Exception | None:
        """What the handler raised."""
        try:
            if self._payload is not None:
                message = msgspec.structs.replace(message, payload=message.as_(self._payload))
            returned = self._handler(message)
            require_finished(returned if self._loop is None else self._loop.run_until_complete(returned))
        except Exception as error:
            return error
        return None
