"""Runs the blocking façade on an event loop: wherever it waits, its greenlet stands still and the loop goes on.

`run` is called by coroutines (`custody.aio`). The other functions are called by blocking code, at the few places where
it waits: in a greenlet of `run` they let the loop wait, in any other place they block the thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar, copy_context
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

from custody import extras
from custody.errors import InvalidArgument

try:
    import greenlet
except ModuleNotFoundError:  # custody[asyncio] is not installed, and `run` says so
    _Greenlet: Any = object
else:
    _Greenlet = greenlet.greenlet

T = TypeVar("T")


class _Work(_Greenlet):  # type: ignore[misc]  # a class that may be missing
    """Blocking code under way, and the task that waits for it. `late`: a cancellation that came when a statement had
    taken effect already."""

    task: asyncio.Task[Any] | None = None
    late: asyncio.CancelledError | None = None


_work: ContextVar[_Work | None] = ContextVar("custody_bridge", default=None)
"""The work that the current task waits for. A task that was started meanwhile has a copy."""


async def run(work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
    """Runs blocking code, and awaits what it passes to `awaited`.

    An exception of what is awaited, a cancellation too, is raised where the code waits, so its `with` and `finally` do
    their part. If the task was cancelled although a statement took effect, `undo` is run with the result.
    """
    with extras.named():
        import greenlet
    one = _Work(work, greenlet.getcurrent())
    one.gr_context, one.task = copy_context(), asyncio.current_task()
    token = _work.set(one)
    try:
        asked: Any = one.switch()
        while not one.dead:
            try:
                answer = await asked
            except BaseException as error:
                asked = one.throw(type(error), error, error.__traceback__)
            else:
                asked = one.switch(answer)
    except Exception as error:
        if one.late is not None:
            raise one.late from error
        raise
    finally:
        _work.reset(token)
    if one.late is not None:
        if undo is not None:
            await run(lambda: undo(asked))
        raise one.late
    return cast(T, asked)


def bridged() -> bool:
    """Whether the calling code is run by `run`."""
    return _Greenlet is not object and isinstance(greenlet.getcurrent(), _Work)


def awaited(awaitable: Awaitable[T]) -> T:
    """Waits for it on the event loop. Only for code that is run by `run`."""
    work = greenlet.getcurrent()
    assert isinstance(work, _Work), "there is no event loop here to wait on"
    return cast(T, work.parent.switch(awaitable))


class OneLoop:
    """Refuses every event loop but the one in which it was made."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def require(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidArgument(
                "this Custody was opened in another event loop", "Open one in each event loop that needs it."
            )


def postpone(cancellation: asyncio.CancelledError) -> bool:
    """Called when the task is cancelled while it waits for a statement that has taken effect.

    If the statement belongs to `run`, the code may have its result, and is cancelled later. False if it does not.
    """
    work = _waited_for()
    if work is None:
        return False
    work.late = cancellation
    return True


def raise_postponed() -> None:
    """Raises the postponed cancellation now, where nothing has taken effect yet: in an open transaction."""
    work = _waited_for()
    if work is not None and work.late is not None:
        late, work.late = work.late, None
        raise late


def _waited_for() -> _Work | None:
    """The work that the current task itself waits for."""
    work = _work.get()
    return work if work is not None and work.task is asyncio.current_task() else None


def pause(seconds: float) -> None:
    """Sleeps."""
    if bridged():
        awaited(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def lock() -> AbstractContextManager[object]:
    """A lock that may be held while its owner waits: for tasks where the caller is one, otherwise for threads."""
    return Entered(asyncio.Lock()) if bridged() else threading.Lock()


def outside(work: Callable[[], T]) -> T:
    """Runs code that cannot wait on the event loop in a thread: for what happens once, such as the start of a server. A
    cancellation comes after its end."""
    return awaited(_in_thread(work)) if bridged() else work()


async def _in_thread(work: Callable[[], T]) -> T:
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError as cancellation:
        result = await running
        if postpone(cancellation):
            return result
        raise


def start(work: Callable[[], object], *, name: str) -> Callable[[], object]:
    """Runs code in the background: as a task where the caller is one, otherwise in a thread. What it returns cancels
    the task; a thread ends by itself."""
    if not bridged():
        threading.Thread(target=work, name=name, daemon=True).start()
        return lambda: None
    task = asyncio.get_running_loop().create_task(run(work), name=name)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task.cancel


_background: set[asyncio.Task[object]] = set()
"""The loop itself would forget them."""


class Event(Protocol):
    """What is used of `threading.Event`."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


def event() -> Event:
    """An event, for tasks where the caller is one, otherwise for threads."""
    return _LoopEvent() if bridged() else threading.Event()


class _LoopEvent:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        return awaited(self._wait(timeout))

    async def _wait(self, timeout: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout):
                return await self._event.wait()
        except TimeoutError:
            return False


class Entered(AbstractContextManager[T]):
    """An asynchronous context manager, for blocking code that is run by `run`."""

    def __init__(self, context: AbstractAsyncContextManager[T]) -> None:
        self._context = context

    def __enter__(self) -> T:
        return awaited(self._context.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return awaited(self._context.__aexit__(kind, error, trace))
