"""Wake-ups of topics: clients wait here until something is published, without claiming it."""

from __future__ import annotations

import asyncio
import uuid


class Wakeups:
    """Counts the wake-ups of each topic. A token records the last one that a client was told of. A token of another
    server, or of this one before a restart, is always out of date."""

    def __init__(self) -> None:
        self._run = uuid.uuid4().hex[:12]
        self._counts: dict[str, int] = {}
        self._missed = 0
        """Wake-ups of unknown topics: those sent while this server did not listen. They count for every topic."""
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._closed = False

    def token(self, topic: str) -> str:
        return f"{self._run}-{self._missed}-{self._counts.get(topic, 0)}"

    def wake(self, topic: str | None) -> None:
        """Records that something was published in a topic; None: perhaps in any of them."""
        if topic is None:
            self._missed += 1
        else:
            self._counts[topic] = self._counts.get(topic, 0) + 1
        self._end_waits(topic)

    def _end_waits(self, topic: str | None) -> None:
        for name in list(self._waiting) if topic is None else [topic]:
            for waiting in self._waiting.get(name, ()):
                if not waiting.done():
                    waiting.set_result(None)

    async def wait(self, topic: str, since: str | None, wait: float) -> None:
        """Returns as soon as the token is no longer `since`, at the latest after `wait` seconds."""
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
        """Ends all waits."""
        self._closed = True
        self._end_waits(None)
