"""The threads that publish. Each destination has a share of them, so that one that hangs does not take those of others.

Until it has answered, a destination gets a quarter of its share, so that many hanging ones take few threads each.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

SHARES = 16  # destinations that can use their whole share at the same time
MOST_ANSWERING = 10_000

Work = Callable[[], bool | None]
"""Returns whether the destination has answered; None if it was not called."""


@dataclass
class _Lane:
    """The work for one destination: running, and waiting in order of arrival."""

    share: int
    busy: int = 0
    waiting: deque[Work] = field(default_factory=deque)


class Threads:
    """Runs work for destinations: at most `share` at a time for one of them, and sixteen times as much in total."""

    def __init__(self, share: int) -> None:
        self.share, self._most = share, share * SHARES
        self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="custody-publisher")
        self._lanes: dict[str, _Lane] = {}
        self._answering: set[str] = set()
        self._closed = False
        self._guard = threading.Lock()

    def submit(self, destination: str, work: Work, *, share: int | None = None) -> None:
        """Adds work for a destination. `share`: a smaller share than the default."""
        with self._guard:
            lane = self._lanes.setdefault(destination, _Lane(min(share or self.share, self.share)))
            lane.waiting.append(work)
            self._start(destination, lane)

    def full(self) -> list[str]:
        """Destinations whose threads are all busy."""
        with self._guard:
            return sorted(name for name, lane in self._lanes.items() if lane.busy >= self._share(name, lane))

    @property
    def idle(self) -> bool:
        """Whether a thread is free."""
        with self._guard:
            return sum(lane.busy for lane in self._lanes.values()) < self._most

    def close(self) -> None:
        """Waits for running work. Waiting work is not started."""
        with self._guard:
            self._closed = True
        self._pool.shutdown(wait=True)

    def _share(self, destination: str, lane: _Lane) -> int:
        return lane.share if destination in self._answering else max(1, lane.share // 4)

    def _start(self, destination: str, lane: _Lane) -> None:
        """Starts waiting work up to the share of the destination, unless it is closed."""
        while lane.waiting and not self._closed and lane.busy < self._share(destination, lane):
            lane.busy += 1
            self._pool.submit(self._run, destination, lane, lane.waiting.popleft())

    def _learn(self, destination: str, answered: bool | None) -> None:
        if answered and len(self._answering) < MOST_ANSWERING:
            self._answering.add(destination)
        elif answered is False:
            self._answering.discard(destination)

    def _run(self, destination: str, lane: _Lane, work: Work) -> None:
        while True:
            answered = work()
            with self._guard:
                self._learn(destination, answered)
                self._start(destination, lane)
                if not lane.waiting or lane.busy > self._share(destination, lane):
                    lane.busy -= 1
                    if lane.busy == 0:
                        del self._lanes[destination]
                    return
                work = lane.waiting.popleft()
