"""How much a server holds in memory for its clients: bodies that come in, and answers that go out."""

from __future__ import annotations

import asyncio
from collections import deque

from custody.errors import Busy

SMALL = 64 * 1024
"""What is not larger than this is not counted: the number of connections bounds it."""
_REMEDY = "Try again in a moment; `--max-buffered` of the server is the limit."


class Buffer:
    """Bytes of one kind, up to a limit. Lives in one event loop."""

    def __init__(self, most: int, kind: str) -> None:
        self._most, self._kind = most, kind
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def full(self) -> bool:
        return self.held >= self._most

    async def take(self, size: int, timeout: float) -> int:
        """Waits for room for so many bytes, in the order of arrival, and takes it; returns what to give back."""
        if size <= SMALL:
            return 0
        size = min(size, self._most)  # what is larger than the limit goes alone
        await self._turn(size, timeout)
        return size

    async def room(self, timeout: float) -> None:
        """Waits until less is held than may be, and takes nothing."""
        if self.full():
            await self._turn(0, timeout)

    def hold(self, size: int) -> int:
        """Counts what there is already; returns what to give back."""
        if size <= SMALL:
            return 0
        self.held += size
        return size

    def give(self, size: int) -> None:
        """So many bytes are free again: those who waited for them have their turn."""
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
                self.give(0)  # whoever comes after it may need less
            else:  # its turn had come
                self.give(size)
            if isinstance(error, TimeoutError):
                raise Busy(f"the server holds as many {self._kind} as it may", _REMEDY) from None
            raise
