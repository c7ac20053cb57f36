"""The queue of those whose requests share transactions: who goes now, who waits, and who goes with whom.

Nobody waits for others to come: if nothing is under way, a request starts at once. So a lone caller is answered as
fast as without the queue, and many share one commit with all that arrived meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
Place = TypeVar("Place")

HEAVIEST = 16 * 2**20
"""Most bytes of a batch of several items: PostgreSQL takes at most a gigabyte in one call."""


class Waiting(Generic[Item, Place]):
    """An item in the queue, and where its answer goes. `alone`: it has to wait for a lock, so it gets a transaction of
    its own."""

    __slots__ = ("alone", "item", "keys", "place", "weight")

    def __init__(self, item: Item, place: Place, *, keys: Collection[Hashable], weight: int) -> None:
        self.item, self.place, self.keys, self.weight, self.alone = item, place, frozenset(keys), weight, False


class Batch(NamedTuple, Generic[Item, Place]):
    """Items that go together, and the keys of which they are the only batch."""

    waiting: Sequence[Waiting[Item, Place]]
    keys: frozenset[Hashable]

    @property
    def items(self) -> list[Item]:
        return [one.item for one in self.waiting]


class Queue(Generic[Item, Place]):
    """Puts items into batches. It performs nothing and knows neither threads nor an event loop: whoever uses it calls
    it from one place at a time, begins each batch that it gives, and says when that is done.

    For each key one batch at a time is under way, in the order of arrival; items of other keys need not wait for it.
    """

    def __init__(
        self, *, keys: Callable[[Item], Collection[Hashable]], slots: int = 3, most: int = 500, enabled: bool = True
    ) -> None:
        self._keys, self._slots, self._most, self._enabled = keys, slots, most, enabled
        self.pending: list[Waiting[Item, Place]] = []
        self.running = 0
        self._busy: set[Hashable] = set()
        self._wanted: set[Hashable] = set()
        """Keys of pending items: a later item with one of them must not overtake."""

    def add(self, item: Item, place: Place, weight: int = 0) -> Batch[Item, Place] | None:
        """The batch that begins now, of this item alone, or None if it has to wait."""
        waiting = Waiting(item, place, keys=self._keys(item), weight=weight)
        if not self._enabled:
            return self._begin([waiting], frozenset())
        if self.running < self._slots and waiting.keys.isdisjoint(self._busy | self._wanted):
            # while a slot is free, pending items wait for their keys: none of them could join this batch
            return self._begin([waiting], waiting.keys)
        self.pending.append(waiting)
        self._wanted |= waiting.keys
        return None

    def done(self, batch: Batch[Item, Place], again: Sequence[Waiting[Item, Place]] = ()) -> list[Batch[Item, Place]]:
        """Says that a batch is over, and which of its items were not done because they would have waited for a lock:
        they are tried again alone. Returns the batches that begin now."""
        self.running -= 1
        self._busy -= batch.keys
        for waiting in again:
            waiting.alone = True
        self.pending = [*again, *self.pending]
        begun = []
        while self.pending and self.running < self._slots:
            taken = self._take()
            if not taken:
                break
            begun.append(self._begin(taken, frozenset().union(*(waiting.keys for waiting in taken))))
        return begun

    def _begin(self, taken: Sequence[Waiting[Item, Place]], keys: frozenset[Hashable]) -> Batch[Item, Place]:
        self.running += 1
        self._busy |= keys
        return Batch(taken, keys)

    def _take(self) -> list[Waiting[Item, Place]]:
        """Takes the items that can start now. One that goes alone is joined only by others of the same single key."""
        taken: list[Waiting[Item, Place]] = []
        left: list[Waiting[Item, Place]] = []
        held = set(self._busy)
        weight = 0
        for waiting in self.pending:
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
        self.pending = left
        self._wanted = set().union(*(waiting.keys for waiting in left))
        return taken
