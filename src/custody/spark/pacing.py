"""How much the next claim takes: what the pipeline gets done in a given time, so that results are never long in coming.

A claim is committed as a whole. One of 100,000 messages whose handler takes a second each would show nothing for a day,
and a stop would wait for it. So a pipeline begins small and takes more as long as its batches are quick; when a handler
or a full sink makes them slow it takes less.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 250
"""Messages for each task in the first claim: a second of work if one takes four milliseconds."""
GROWTH = 4
"""A batch that was quick says little of one that is much larger: it may be all waiting time."""


@dataclass
class Pace:
    """The size of the next claim, from how long the last batch took."""

    most: int
    aim: float
    """Seconds that a batch should take at most."""
    tasks: int
    size: int = 0

    def __post_init__(self) -> None:
        self.size = min(self.most, FIRST * self.tasks)

    def took(self, messages: int, seconds: float) -> None:
        """A batch of so many messages is over."""
        fits = int(messages * self.aim / max(seconds, 0.001))
        if seconds > self.aim:
            self.size = max(1, min(self.size, fits))
        elif messages * 2 > self.size:  # a smaller one says nothing of what a full one would take
            self.size = min(self.most, max(self.size, min(fits, self.size * GROWTH)))
