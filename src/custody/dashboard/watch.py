"""The status of all groups, read once for everybody who looks; and what it was in the last hour."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from custody.errors import CustodyError
from custody.model.status import WINDOW, Status

if TYPE_CHECKING:
    from custody.http.state import ServerState

FRESH = 1.0
"""Seconds for which a status is shown to others too."""
STEP = 20.0
"""Seconds between the points of a sparkline."""
HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The figures of one moment: messages ever appended by topic, and the lag by group."""

    at: float
    appended: dict[str, int]
    lag: dict[tuple[str, str], int]


class Watch:
    """Used in the event loop of a server. For an hour after somebody has looked it goes on reading, at intervals; a
    server that nobody watches does nothing more."""

    def __init__(self, state: ServerState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._reading: asyncio.Future[Status] | None = None
        self._read_at = float("-inf")
        self._recent: deque[Sample] = deque(maxlen=round(2 * WINDOW))
        self._hour: deque[Sample] = deque(maxlen=round(HOUR / STEP))
        self._looked_at = float("-inf")
        self._sampling: asyncio.Task[None] | None = None

    async def status(self) -> Status:
        """The status, at most a second old. All who ask at the same time share one call."""
        self._looked_at = self._clock()
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.create_task(self._sample())
        return await self._shared()

    def close(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()

    async def _sample(self) -> None:
        while self._clock() - self._looked_at < HOUR:
            await asyncio.sleep(STEP)
            with suppress(CustodyError):  # the next look says so
                await self._shared()

    async def _shared(self) -> Status:
        stale = self._clock() - self._read_at > FRESH
        if self._reading is None or (self._reading.done() and (stale or self._reading.exception() is not None)):
            self._read_at = self._clock()
            self._reading = asyncio.ensure_future(self._read())
        return await asyncio.shield(self._reading)

    async def _read(self) -> Status:
        found = await self._state.run(self._state.engine.status)
        sample = Sample(
            at=self._clock(),
            appended={one.topic: one.appended for one in found.topics},
            lag={(one.topic, one.group): one.lag for one in found.groups},
        )
        self._recent.append(sample)
        if not self._hour or sample.at - self._hour[-1].at >= STEP:
            self._hour.append(sample)
        return found

    def published_rate(self, topic: str) -> float | None:
        """Messages per second that were published in the last minute; None before there is something to compare."""
        if not self._recent:
            return None
        now = self._recent[-1]
        before = next((one for one in self._recent if now.at - one.at <= WINDOW and topic in one.appended), now)
        if before is now or topic not in now.appended:
            return None
        # a topic that was deleted and created again has begun anew
        return max(0, now.appended[topic] - before.appended[topic]) / (now.at - before.at)

    def lags(self, topic: str, group: str) -> list[tuple[float, int]]:
        """The lag of a group in the last hour, with the age of each value in seconds, oldest first."""
        if not self._recent:
            return []
        now, place = self._recent[-1], (topic, group)
        points = [*self._hour, *([] if self._hour and self._hour[-1] is now else [now])]
        return [(now.at - one.at, one.lag[place]) for one in points if place in one.lag and now.at - one.at <= HOUR]
