"""Coalescing: what arrives while a transaction is under way goes together in the next one.

Nothing waits for company: with nobody before it, a request goes at once. So an idle server answers as fast as without
this, and a busy one commits once for all that came meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Generic, TypeVar

from custody.errors import CustodyError

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_Waiting = tuple[Item, "asyncio.Future[Answer]"]


class Coalescer(Generic[Item, Answer]):
    """Gathers items and performs them in batches, in threads. Lives in one event loop.

    Of the items of a key one batch is under way at a time; items of other keys need not wait for it.
    """

    def __init__(
        self,
        perform: Callable[[Sequence[Item]], Sequence[Answer | CustodyError]],
        executor: Executor,
        *,
        keys: Callable[[Item], Collection[Hashable]],
        slots: int = 3,
        most: int = 500,
        enabled: bool = True,
        observe: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._perform, self._executor, self._keys, self._observe = perform, executor, keys, observe
        self._slots, self._most, self._enabled = slots, most, enabled
        self._pending: list[_Waiting[Item, Answer]] = []
        self._busy: set[Hashable] = set()
        self._running = 0

    async def submit(self, item: Item) -> Answer:
        """The answer to this item, or the error that is its own."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._pending.append((item, future))
        self._start()
        return await future

    def _start(self) -> None:
        while self._pending and (self._running < self._slots or not self._enabled):
            batch, keys = self._take()
            if not batch:
                return
            self._running += 1
            self._busy |= keys
            self._observe(len(batch))
            items = [item for item, _ in batch]
            under_way = asyncio.get_running_loop().run_in_executor(self._executor, self._perform, items)
            under_way.add_done_callback(partial(self._done, batch, keys))

    def _take(self) -> tuple[list[_Waiting[Item, Answer]], set[Hashable]]:
        if not self._enabled:
            return [self._pending.pop(0)], set()
        taken: list[_Waiting[Item, Answer]] = []
        left: list[_Waiting[Item, Answer]] = []
        keys: set[Hashable] = set()
        for waiting in self._pending:
            own = self._keys(waiting[0])
            if len(taken) == self._most or not self._busy.isdisjoint(own):
                left.append(waiting)
            else:
                taken.append(waiting)
                keys.update(own)
        self._pending = left
        return taken, keys

    def _done(
        self,
        batch: list[_Waiting[Item, Answer]],
        keys: set[Hashable],
        under_way: asyncio.Future[Sequence[Answer | CustodyError]],
    ) -> None:
        self._running -= 1
        self._busy -= keys
        self._start()
        error = under_way.exception()
        answers = [error for _ in batch] if error is not None else under_way.result()
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():  # nobody waits for it any more
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
