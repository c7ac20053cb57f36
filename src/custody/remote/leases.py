"""What a client remembers of its leases: where to look up what became of a settle whose answer was lost."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from uuid import UUID

from custody.remote.forking import tell_of_forks

REMEMBERED = 20_000
"""So many ranges of offsets are remembered: mostly a lease is one, and some are in pieces."""

OPEN = 1_000
"""So many transactions that acknowledge something are remembered until they end."""

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Where the messages of a lease are, and which of them are not settled yet as far as this client knows.

    `unsure`: a settle of some of them may have taken effect, or may yet.
    """

    topic: str
    group: str
    partition: int
    ranges: Ranges
    unsure: bool = False

    @property
    def offsets(self) -> Iterator[int]:
        return (offset for first, end in self.ranges for offset in range(first, end))

    def __contains__(self, offset: int) -> bool:
        return any(first <= offset < end for first, end in self.ranges)


class Leases:
    """The last leases of this client that are not settled."""

    def __init__(self) -> None:
        self._held: OrderedDict[UUID, Held] = OrderedDict()
        self._ranges = 0
        self._transactions: OrderedDict[UUID, list[tuple[UUID, Ranges | None]]] = OrderedDict()
        self._lock = threading.Lock()
        tell_of_forks(self)

    def forked(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent may have held it

    def remember(self, lease_id: UUID, topic: str, group: str, partition: int, offsets: Iterable[int]) -> None:
        with self._lock:
            self._keep(lease_id, Held(topic=topic, group=group, partition=partition, ranges=ranges_of(offsets)))

    def get(self, lease_id: UUID) -> Held | None:
        with self._lock:
            return self._held.get(lease_id)

    def unsure(self, lease_id: UUID) -> None:
        """A settle of this lease may have taken effect."""
        with self._lock:
            if lease_id in self._held:
                self._held[lease_id] = replace(self._held[lease_id], unsure=True)

    def settled(self, lease_id: UUID, offsets: Iterable[int] | None) -> None:
        """These have left the lease, or all of them."""
        with self._lock:
            self._settled(lease_id, None if offsets is None else ranges_of(offsets))

    def acked_in(self, transaction_id: UUID, lease_id: UUID, offsets: Iterable[int] | None) -> None:
        """These leave the lease when the transaction is committed."""
        with self._lock:
            acked = None if offsets is None else ranges_of(offsets)
            self._transactions.setdefault(transaction_id, []).append((lease_id, acked))
            while len(self._transactions) > OPEN:
                self._transactions.popitem(last=False)

    def ended(self, transaction_id: UUID, *, committed: bool) -> None:
        with self._lock:
            for lease_id, acked in self._transactions.pop(transaction_id, ()):
                if committed:
                    self._settled(lease_id, acked)

    def _settled(self, lease_id: UUID, gone: Ranges | None) -> None:
        held = self._held.pop(lease_id, None)
        if held is None:
            return
        self._ranges -= len(held.ranges)
        left = () if gone is None else without(held.ranges, gone)
        if left:
            self._keep(lease_id, replace(held, ranges=left))

    def _keep(self, lease_id: UUID, held: Held) -> None:
        self._held[lease_id] = held
        self._ranges += len(held.ranges)
        while self._ranges > REMEMBERED:
            self._ranges -= len(self._held.popitem(last=False)[1].ranges)


def ranges_of(offsets: Iterable[int]) -> Ranges:
    """Offsets as ranges: from the first to the one after the last of each."""
    ranges: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if ranges and offset <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], offset + 1)
        else:
            ranges.append((offset, offset + 1))
    return tuple(ranges)


def without(ranges: Ranges, gone: Ranges) -> Ranges:
    """What of the first is not in the second. Both are in order."""
    left: list[tuple[int, int]] = []
    rest = iter((*gone, None))
    hole = next(rest)
    for first, end in ranges:
        while hole is not None and hole[0] < end:
            if first < hole[0]:
                left.append((first, hole[0]))
            first = max(first, hole[1])
            if hole[1] > end:
                break  # it may reach into the next range
            hole = next(rest)
        if first < end:
            left.append((first, end))
    return tuple(left)
