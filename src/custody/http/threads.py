"""The threads of a server. The engine is blocking: each call of it runs in one of them, and needs a connection."""

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
"""Connections beyond those for requests: for the keys, the figures, /readyz, the upkeep, and the outbox's events."""
SLOW = 0.1
"""Seconds of a claim after which the next one of the same place waits for its turn with other slow ones."""
REMEMBERED = 1_000
"""How many slow places are known at most."""


class Threads:
    """As many as there are connections, so that nobody waits for a connection in a thread: a third of them for the
    calls of operators, which may take long, the rest for the traffic.

    Publishes and acks are bounded by whoever gathers them. Of all else in the traffic only a few are under way at a
    time (`claiming`, `settling`, `appending`): neither what somebody holds in the database nor claims that are
    expensive, for example by their bindings, may take every thread.
    """

    def __init__(self, connections: int) -> None:
        slow = max(1, connections // 3)
        quick = max(1, connections - slow)
        self.quick = ThreadPoolExecutor(quick, thread_name_prefix="custody-quick")
        self.slow = ThreadPoolExecutor(slow, thread_name_prefix="custody-slow")
        self.keys = ThreadPoolExecutor(1, thread_name_prefix="custody-keys")
        self.looks = ThreadPoolExecutor(2, thread_name_prefix="custody-looks")
        self.claiming = Claiming(max(1, (quick + 1) // 2))
        self.settling = asyncio.Semaphore(max(1, quick // 2))
        self.appending = asyncio.Semaphore(max(1, quick // 3))
        self._turns: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, of: object) -> AsyncIterator[None]:
        """One at a time of a lease, a transaction: what is sent again while the first still waits takes no thread."""
        lock = self._turns.get(of)
        if lock is None:
            lock = self._turns[of] = asyncio.Lock()
        async with lock:
            yield

    async def close(self) -> None:
        """Waits for what is under way."""
        for executor in (self.quick, self.slow, self.keys, self.looks):
            await asyncio.to_thread(executor.shutdown)


class Claiming:
    """Turns of claims: half of the threads at most, and one is kept for places whose last claim was not slow, so that
    they do not wait behind those whose claims are."""

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
    """What a verb returns that runs in a thread of these."""
    return await asyncio.get_running_loop().run_in_executor(executor, partial(verb, *args, **kwargs))
