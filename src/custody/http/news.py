"""News of topics: who waits to hear that something was published, without claiming it."""

from __future__ import annotations

import asyncio
import uuid


class News:
    """Counts the hints for each topic. A token says up to which one somebody has heard; that of another server, or of
    this one before a restart, is always out of date."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex[:12]
        self._heard: dict[str, int] = {}
        self._missed = 0
        """Counted in all topics: hints for any of them that nobody may have heard."""
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._closed = False

    def token(self, topic: str) -> str:
        return f"{self._run}-{self._missed}-{self._heard.get(topic, 0)}"

    def tell(self, topic: str | None) -> None:
        """There is news of a topic; None: perhaps of any."""
        if topic is None:
            self._missed += 1
        else:
            self._heard[topic] = self._heard.get(topic, 0) + 1
        self._wake(topic)

    def _wake(self, topic: str | None) -> None:
        for name in list(self._waiting) if topic is None else [topic]:
            for waiting in self._waiting.get(name, ()):
                if not waiting.done():
                    waiting.set_result(None)

    async def wait(self, topic: str, since: str | None, wait: float) -> None:
        """Returns when there is something newer than `since`, and at the latest after `wait` seconds."""
        if self._closed or since != self.token(topic):
            return
        waiting = asyncio.get_running_loop().create_future()
        line = self._waiting.setdefault(topic, set())
        line.add(waiting)
        try:
            await asyncio.wait([waiting], timeout=wait)
        finally:
            line.discard(waiting)
            if not line:
                self._waiting.pop(topic, None)

    def close(self) -> None:
        """Ends all waiting."""
        self._closed = True
        self._wake(None)
