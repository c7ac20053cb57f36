"""Transactions that threads of one client share: what comes while one is under way goes in the next."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Generic, TypeVar

from custody.coalesced.blocking import BLOCKED
from custody.coalesced.queue import Batch, Queue
from custody.errors import CustodyError
from custody.forking import reset_after_fork

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class _Turn(Generic[Item, Answer]):
    """A thread that waits: for its answer, or to perform a batch that it is in."""

    __slots__ = ("answer", "batch", "wake")

    def __init__(self) -> None:
        self.answer: Answer | BaseException | None = None
        self.batch: Batch[Item, _Turn[Item, Answer]] | None = None
        self.wake = threading.Lock()
        self.wake.acquire()


class Shared(Generic[Item, Answer]):
    """Performs items of many threads in batches. There is no thread of its own: one of those that wait performs the
    batch for all in it.

    A thread that finds nothing under way performs its item by itself, as if there were no others. So does the main
    thread in any case: only there Ctrl-C can end a call, and it must not end those of other threads.
    """

    def __init__(
        self,
        perform: Callable[[Sequence[Item]], Sequence[Answer | CustodyError]],
        *,
        keys: Callable[[Item], Collection[Hashable]],
        slots: int = 3,
        most: int = 500,
    ) -> None:
        self._perform = perform
        self._new_queue: Callable[[], Queue[Item, _Turn[Item, Answer]]] = lambda: Queue(
            keys=keys, slots=slots, most=most
        )
        self.forked()
        reset_after_fork(self)

    def forked(self) -> None:
        """Begins anew: the threads that were waiting are the parent's."""
        self._guard, self.queue = threading.Lock(), self._new_queue()

    def submit(self, item: Item, alone: Callable[[], Answer], weight: int = 0) -> Answer:
        """The answer to this item, or its error. `alone` performs it without any other; `weight` is its size."""
        if threading.current_thread() is threading.main_thread():
            return alone()
        turn: _Turn[Item, Answer] = _Turn()
        with self._guard:
            batch = self.queue.add(item, turn, weight)
        if batch is not None:
            try:
                return alone()
            finally:
                self._over(batch)
        while True:
            turn.wake.acquire()
            if turn.batch is None:
                break
            batch, turn.batch = turn.batch, None
            self._answer_all(batch)
        if isinstance(turn.answer, BaseException):
            raise copy.copy(turn.answer) from turn.answer  # it may be the answer to several threads
        return turn.answer  # type: ignore[return-value]  # a turn that ends without a batch has its answer

    def _answer_all(self, batch: Batch[Item, _Turn[Item, Answer]]) -> None:
        answers: Sequence[Answer | BaseException]
        try:
            answers = self._perform(batch.items)
        except BaseException as error:
            answers = [error for _ in batch.waiting]
        done = list(zip(batch.waiting, answers, strict=True))
        self._over(batch, [waiting for waiting, answer in done if answer is BLOCKED])
        for waiting, answer in done:
            if answer is not BLOCKED:
                waiting.place.answer = answer
                waiting.place.wake.release()

    def _over(self, batch: Batch[Item, _Turn[Item, Answer]], again: Sequence[object] = ()) -> None:
        """Lets the next batches begin, each in a thread that is in it."""
        with self._guard:
            begun = self.queue.done(batch, again)  # type: ignore[arg-type]  # those of the batch
        for following in begun:
            first = following.waiting[0].place
            first.batch = following
            first.wake.release()
