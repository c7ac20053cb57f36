"""Coalescing: requests that arrive while a transaction is under way share the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Generic, TypeVar

from custody.coalesced import BLOCKED
from custody.coalesced.queue import Batch, Queue
from custody.errors import CustodyError

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Coalescer(Generic[Item, Answer]):
    """Gathers items in a queue and performs them in batches, in threads. Used in one event loop.

    An item that is answered `BLOCKED` was not done: it is tried again alone, so that it does not delay others.
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
        self._perform, self._executor, self._observe = perform, executor, observe
        self.queue: Queue[Item, asyncio.Future[Answer]] = Queue(keys=keys, slots=slots, most=most, enabled=enabled)

    async def submit(self, item: Item, weight: int = 0) -> Answer:
        """Returns the answer to this item, or raises its error. `weight`: its size in bytes."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        batch = self.queue.add(item, future, weight)
        if batch is not None:
            self._begin(batch)
        return await future

    def _begin(self, batch: Batch[Item, asyncio.Future[Answer]]) -> None:
        self._observe(len(batch.waiting))
        under_way = asyncio.get_running_loop().run_in_executor(self._executor, self._perform, batch.items)
        under_way.add_done_callback(partial(self._done, batch))

    def _done(
        self,
        batch: Batch[Item, asyncio.Future[Answer]],
        under_way: asyncio.Future[Sequence[Answer | CustodyError]],
    ) -> None:
        error = under_way.exception()
        answers = [error for _ in batch.waiting] if error is not None else under_way.result()
        again = []
        for waiting, answer in zip(batch.waiting, answers, strict=True):
            if waiting.place.done():  # the request was cancelled
                continue
            if answer is BLOCKED:
                again.append(waiting)
            elif isinstance(answer, BaseException):
                waiting.place.set_exception(answer)
            else:
                waiting.place.set_result(answer)
        for following in self.queue.done(batch, again):
            self._begin(following)
