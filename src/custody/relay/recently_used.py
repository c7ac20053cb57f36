"""A cache of connections by address. It keeps the most recently used ones, as events may name any number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

MOST = 32

T = TypeVar("T")


class RecentlyUsed(Generic[T]):
    """Opens a connection on first use. Safe for several threads: opening one does not block the use of another."""

    def __init__(self, open: Callable[[str], T], close: Callable[[T], None], *, most: int = MOST) -> None:
        self._open, self._close, self._most = open, close, most
        self._kept: OrderedDict[str, T] = OrderedDict()
        self._guard = threading.Lock()

    def get(self, address: str) -> T:
        with self._guard:
            if address in self._kept:
                self._kept.move_to_end(address)
                return self._kept[address]
        made = self._open(address)
        with self._guard:
            found = self._kept.setdefault(address, made)  # another thread may have been faster
            self._kept.move_to_end(address)
            surplus = [] if found is made else [made]
            while len(self._kept) > self._most:
                surplus.append(self._kept.popitem(last=False)[1])
        for each in surplus:
            self._close(each)
        return found

    def drop(self, address: str) -> None:
        """Closes a connection, so that the next use opens a new one: its name may resolve to another address now."""
        with self._guard:
            found = self._kept.pop(address, None)
        if found is not None:
            self._close(found)

    def close(self) -> None:
        with self._guard:
            closing = list(self._kept.values())
            self._kept.clear()
        for each in closing:
            self._close(each)
