"""Calls a handler: a function in the calling thread, a coroutine function in an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import cast

import msgspec

from custody import tracing
from custody.handlers import is_coroutine_function, require_finished, wrapped
from custody.model.entities import Message
from custody.worker.failure_log import FailureLog

Handler = Callable[[Message], object] | Callable[[Message], Awaitable[object]]


class NotBegun(Exception):
    """The handler was not called, because its lease may have expired."""


class HandlerRunner:
    """Calls the handler and returns what it raised. No exception of a handler propagates, not even SystemExit."""

    def __init__(
        self,
        handler: Handler,
        timeout: float | None,
        group: str,
        payload: type | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`loop`: where coroutines run, which somebody else runs; by default one of their own."""
        self._handler = wrapped(handler)
        self._payload = payload
        self._timeout = timeout
        self._group = group
        self._failures = FailureLog()
        self._loop, self._own = (loop if is_coroutine_function(handler) else None), False
        if self._loop is None and is_coroutine_function(handler):
            self._own = True
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=[self._loop], name="custody-loop", daemon=True).start()

    @property
    def ends_stuck_handlers(self) -> bool:
        """A coroutine can be cancelled at its timeout; a thread cannot."""
        return self._loop is not None

    def close(self) -> None:
        if self._loop is not None and self._own:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def __call__(self, message: Message, may_begin: Callable[[], bool]) -> BaseException | None:
        """What the handler raised, or `NotBegun` if it may not start."""
        if not may_begin():
            return NotBegun()
        with tracing.processing(message, self._group) as span:
            raised = self._call(message, may_begin)
            span.handled(raised)
        if raised is not None and not isinstance(raised, NotBegun):
            self._failures.add(message, raised)
        return raised

    def _call(self, message: Message, may_begin: Callable[[], bool]) -> BaseException | None:
        try:
            if self._payload is not None:
                message = msgspec.structs.replace(message, payload=message.as_(self._payload))
            if self._loop is None:
                require_finished(self._handler(message))
                return None
            running: Future[BaseException | None] = asyncio.run_coroutine_threadsafe(
                self._guarded(message, may_begin), self._loop
            )
            try:
                return running.result(self._timeout)
            except TimeoutError:
                running.cancel()
                return TimeoutError(f"the handler took longer than {self._timeout:g} s")
        except BaseException as error:
            return error

    async def _guarded(self, message: Message, may_begin: Callable[[], bool]) -> BaseException | None:
        """What the coroutine raised. Caught here, because a SystemExit in the loop would end it for all."""
        if not may_begin():  # another coroutine may have blocked the loop
            return NotBegun()
        try:
            require_finished(await cast("Awaitable[object]", self._handler(message)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return error
        return None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """The thread of a coroutine handler: runs the loop until it is stopped, and closes it."""
    try:
        loop.run_forever()
    finally:
        loop.close()
