"""The threads of a server. The engine blocks, so each call of it runs in a thread, and needs a connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

P = ParamSpec("P")
T = TypeVar("T")

SPARE = 5
"""Connections in addition to those for requests: for keys, figures, /readyz, upkeep, and events of the outbox."""
SLOW = 0.1
"""Seconds: after a claim that took longer, the next one of the same place queues with other slow ones."""
REMEMBERED = 1_000
"""Most places that are remembered as slow."""


class Threads:
    """As many threads as connections, so that no thread waits for a connection. A third of them is for operators'
    calls, which may take long (`slow`); the rest is for messages (`quick`).

    The coalescer limits publishes and acks. `claiming`, `settling` and `appending` limit the other calls, so that
    neither locks in the database nor expensive claims (for example because of bindings) can occupy all threads.
    """

    def __init__(self, connections: int) -> None:
        slow = max(1, connections // 3)
        quick = max(1, connections - slow)
        self.quick = ThreadPoolExecutor(quick, thread_name_prefix="custody-quick")
        self.slow = ThreadPoolExecutor(slow, thread_name_prefix="custody-slow")
        self.keys = ThreadPoolExecutor(1, thread_name_prefix="custody-keys")
        self.looks = ThreadPoolExecutor(2, thread_name_prefix="custody-looks")
        self.claiming = ClaimLimiter(max(1, (quick + 1) // 2))
        self.settling = asyncio.Semaphore(max(1, quick // 2))
        self.appending = asyncio.Semaphore(max(1, quick // 3))
        self._turns: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, of: object) -> AsyncIterator[None]:
        """Admits one call at a time for a lease or a transaction, so that repeats of a waiting call take no thread."""
        lock = self._turns.get(of)
        if lock is None:
            lock = self._turns[of] = asyncio.Lock()
        async with lock:
            yield

    async def close(self) -> None:
        """Waits for running calls."""
        for executor in (self.quick, self.slow, self.keys, self.looks):
            await asyncio.to_thread(executor.shutdown)


class ClaimLimiter:
    """Limits claims to half of the threads. One of these is reserved for places whose last claim was not slow, so that
    they do not wait behind slow ones."""

    def __init__(self, most: int) -> None:
        self._all, self._slow = asyncio.Semaphore(most), asyncio.Semaphore(max(1, most - 1))
        self._known: dict[Hashable, None] = {}

    @asynccontextmanager
    async def turn(self, place: Hashable) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if place in self._known:
                await stack.enter_async_context(self._slow)
            await stack.enter_async_context(self._all)
            began = time.monotonic()
            try:
                yield
            finally:
                self._known.pop(place, None)
                if time.monotonic() - began > SLOW:
                    self._known[place] = None
                    if len(self._known) > REMEMBERED:
                        del self._known[next(iter(self._known))]


async def in_thread(executor: Executor, verb: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a verb in a thread of the executor."""
    return await asyncio.get_running_loop().run_in_executor(executor, partial(verb, *args, **kwargs))
