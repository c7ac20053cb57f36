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

from custody.coalesced import BLOCKED
from custody.errors import CustodyError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

HEAVIEST = 16 * 2**20
"""Bytes of one batch, unless it is a single item: PostgreSQL takes no more than a gigabyte in one call."""


class _Waiting(Generic[Item, Answer]):
    """An item in the queue. `alone`: somebody holds what it needs, so it goes by itself and waits for it."""

    __slots__ = ("alone", "future", "item", "keys", "weight")

    def __init__(self, item: Item, keys: Collection[Hashable], weight: int, future: asyncio.Future[Answer]) -> None:
        self.item, self.keys, self.weight, self.future, self.alone = item, frozenset(keys), weight, future, False


class Coalescer(Generic[Item, Answer]):
    """Gathers items and performs them in batches, in threads. Lives in one event loop.

    Of the items of a key one batch is under way at a time, in the order in which they came; items of other keys need
    not wait for it. What is answered `BLOCKED` was not done: it comes again, without those whom it would hold up.
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
        """Keys of those who wait: whoever comes later does not overtake them."""
        self._running = 0

    async def submit(self, item: Item, weight: int = 0) -> Answer:
        """The answer to this item, of so many bytes, or the error that is its own."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(item, self._keys(item), weight, future)
        if not self._enabled:
            self._begin([waiting], frozenset())
        elif self._running < self._slots and waiting.keys.isdisjoint(self._busy | self._wanted):
            # with a slot free all who wait have to wait: none of them would go along
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
        """Everybody who can go now. One who goes alone takes along only those of the same single key."""
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
            if waiting.future.done():  # nobody waits for it any more
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
