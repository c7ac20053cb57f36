"""Coalescing: requests that arrive while a transaction is under way share the next one.

No request waits for others to come: if none is under way, it starts at once. So an idle server answers as fast as
without coalescing, and a busy one commits once for all requests that arrived meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Generic, TypeVar

from custody.coalesced import BLOCKED
from custody.errors import CustodyError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

HEAVIEST = 16 * 2**20
"""Most bytes of a batch of several items: PostgreSQL takes at most a gigabyte in one call."""


class _Waiting(Generic[Item, Answer]):
    """An item in the queue. `alone`: it has to wait for a lock, so it gets a transaction of its own."""

    __slots__ = ("alone", "future", "item", "keys", "weight")

    def __init__(self, item: Item, keys: Collection[Hashable], weight: int, future: asyncio.Future[Answer]) -> None:
        self.item, self.keys, self.weight, self.future, self.alone = item, frozenset(keys), weight, future, False


class Coalescer(Generic[Item, Answer]):
    """Gathers items and performs them in batches, in threads. Used in one event loop.

    For each key one batch at a time is under way, in the order of arrival; items of other keys need not wait for it. An
    item that is answered `BLOCKED` was not done: it is tried again alone, so that it does not delay others.
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
        self._wanted: set[Hashable] = set()
        """Keys of pending items: a later item with one of them must not overtake."""
        self._running = 0

    async def submit(self, item: Item, weight: int = 0) -> Answer:
        """Returns the answer to this item, or raises its error. `weight`: its size in bytes."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(item, self._keys(item), weight, future)
        if not self._enabled:
            self._begin([waiting], frozenset())
        elif self._running < self._slots and waiting.keys.isdisjoint(self._busy | self._wanted):
            # while a slot is free, pending items wait for their keys: none of them could join this batch
            self._begin([waiting], waiting.keys)
        else:
            self._pending.append(waiting)
            self._wanted |= waiting.keys
        return await waiting.future

    def _start(self) -> None:
        while self._pending and self._running < self._slots:
            batch = self._take()
            if not batch:
                return
            self._begin(batch, frozenset().union(*(waiting.keys for waiting in batch)))

    def _begin(self, batch: list[_Waiting[Item, Answer]], keys: frozenset[Hashable]) -> None:
        self._running += 1
        self._busy |= keys
        self._observe(len(batch))
        items = [waiting.item for waiting in batch]
        under_way = asyncio.get_running_loop().run_in_executor(self._executor, self._perform, items)
        under_way.add_done_callback(partial(self._done, batch, keys))

    def _take(self) -> list[_Waiting[Item, Answer]]:
        """Takes the items that can start now. One that goes alone is joined only by others of the same single key."""
        taken: list[_Waiting[Item, Answer]] = []
        left: list[_Waiting[Item, Answer]] = []
        held = set(self._busy)
        weight = 0
        for waiting in self._pending:
            fits = not taken or taken[0].alone == waiting.alone
            if waiting.alone and taken:
                fits = fits and len(waiting.keys) == 1 and waiting.keys == taken[0].keys
            if taken:
                fits = fits and len(taken) < self._most and weight + waiting.weight <= HEAVIEST
            if fits and waiting.keys.isdisjoint(held):
                taken.append(waiting)
                weight += waiting.weight
            else:
                left.append(waiting)
                held |= waiting.keys
        self._pending = left
        self._wanted = set().union(*(waiting.keys for waiting in left))
        return taken

    def _done(
        self,
        batch: list[_Waiting[Item, Answer]],
        keys: frozenset[Hashable],
        under_way: asyncio.Future[Sequence[Answer | CustodyError]],
    ) -> None:
        self._running -= 1
        self._busy -= keys
        error = under_way.exception()
        answers = [error for _ in batch] if error is not None else under_way.result()
        again = []
        for waiting, answer in zip(batch, answers, strict=True):
            if waiting.future.done():  # the request was cancelled
                continue
            if answer is BLOCKED:
                waiting.alone = True
                again.append(waiting)
            elif isinstance(answer, BaseException):
                waiting.future.set_exception(answer)
            else:
                waiting.future.set_result(answer)
        self._pending = again + self._pending
        self._start()
