"""Limits the memory that a server uses for request bodies and for answers."""

from __future__ import annotations

import asyncio
from collections import deque

from custody.errors import Busy

SMALL = 64 * 1024
"""Bytes: smaller bodies and answers are not counted, because the number of connections limits them."""
_REMEDY = "Try again in a moment; `--max-buffered` of the server is the limit."


class Buffer:
    """Counts the bytes of one kind, up to a limit. Used in one event loop."""

    def __init__(self, most: int, kind: str) -> None:
        self._most, self._kind = most, kind
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def full(self) -> bool:
        return self.held >= self._most

    async def take(self, size: int, timeout: float) -> int:
        """Waits for room, in the order of arrival, and reserves it. Returns the size to give back."""
        if size <= SMALL:
            return 0
        size = min(size, self._most)  # one that is larger than the limit goes alone
        await self._turn(size, timeout)
        return size

    async def room(self, timeout: float) -> None:
        """Waits until less than the limit is held. Reserves nothing."""
        if self.full():
            await self._turn(0, timeout)

    def hold(self, size: int) -> int:
        """Counts bytes that exist already, without waiting. Returns the size to give back."""
        if size <= SMALL:
            return 0
        self.held += size
        return size

    def give(self, size: int) -> None:
        """Frees bytes, and lets those who wait for them go on."""
        self.held -= size
        while self._waiting and self._fits(self._waiting[0][0]):
            needed, turn = self._waiting.popleft()
            self.held += needed
            turn.set_result(None)

    def _fits(self, size: int) -> bool:
        return self.held + max(1, size) <= self._most

    async def _turn(self, size: int, timeout: float) -> None:
        if not self._waiting and self._fits(size):
            self.held += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            async with asyncio.timeout(timeout):
                await turn
        except BaseException as error:
            if turn.cancelled():
                self._waiting.remove((size, turn))
                self.give(0)  # the next in line may need less
            else:  # its turn had come
                self.give(size)
            if isinstance(error, TimeoutError):
                raise Busy(f"the server has reached its limit of memory for {self._kind}", _REMEDY) from None
            raise
