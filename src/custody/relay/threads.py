"""The threads that publish: each destination has a share of them, so that one that hangs leaves the others theirs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

SHARES = 4  # destinations that can have all of their threads at the same time

Work = Callable[[], None]


@dataclass
class _Lane:
    """What is to be done for one destination: some of it now, the rest in order of arrival."""

    share: int
    busy: int = 0
    waiting: deque[Work] = field(default_factory=deque)


class Threads:
    """Runs work for destinations, at most `share` at a time for one of them, and four times as much in all."""

    def __init__(self, share: int) -> None:
        self.share, self._most = share, share * SHARES
        self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="custody-publisher")
        self._lanes: dict[str, _Lane] = {}
        self._guard = threading.Lock()

    def submit(self, destination: str, work: Work, *, share: int | None = None) -> None:
        """`share`: a smaller one than usual."""
        with self._guard:
            lane = self._lanes.setdefault(destination, _Lane(min(share or self.share, self.share)))
            if lane.busy >= lane.share:
                lane.waiting.append(work)
                return
            lane.busy += 1
        self._pool.submit(self._run, destination, lane, work)

    def full(self) -> list[str]:
        """The destinations for which more work would only wait."""
        with self._guard:
            return sorted(name for name, lane in self._lanes.items() if lane.busy >= lane.share)

    @property
    def idle(self) -> bool:
        """Whether a thread is free."""
        with self._guard:
            return sum(lane.busy for lane in self._lanes.values()) < self._most

    def close(self) -> None:
        """Waits until all is done."""
        self._pool.shutdown(wait=True)

    def _run(self, destination: str, lane: _Lane, work: Work) -> None:
        while True:
            work()
            with self._guard:
                if not lane.waiting:
                    lane.busy -= 1
                    if lane.busy == 0:
                        del self._lanes[destination]
                    return
                work = lane.waiting.popleft()
