"""How much the next claim takes: what the pipeline gets done in a given time, so that results are never long in coming.

A claim is committed as a whole. One of 100,000 messages whose handler takes a second each would show nothing for a day,
and a stop would wait for it. So a pipeline begins small and takes more as long as its batches are quick; when a handler
or a full sink makes them slow it takes less. What a batch costs whatever its size is no reason for smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST = 250
"""Messages for each task in the first claim: a second of work if one takes four milliseconds."""
GROWTH = 4
"""A batch that was quick says little of one that is much larger."""


@dataclass
class Pace:
    """The size of the next claim, from how long the last batches took."""

    most: int
    aim: float
    """Seconds that a batch should take at most."""
    tasks: int
    size: int = field(init=False)
    _last: tuple[int, float] | None = field(init=False, default=None)
    _each: float = field(init=False, default=0.0)
    """Seconds that one more message takes, by the last batches."""

    def __post_init__(self) -> None:
        self.size = min(self.most, FIRST * self.tasks)

    def took(self, messages: int, seconds: float) -> None:
        """A batch of so many messages is over."""
        self._each = self._learned(messages, seconds)
        fixed = seconds - messages * self._each
        # if most of the time is spent whatever the size, smaller batches would only be more of them
        room = max(self.aim - fixed, self.aim / 2)
        fits = self.most if self._each * self.most <= room else int(room / self._each)
        if fits < self.size or messages * 2 > self.size:  # a smaller one says nothing of what a full one would take
            self.size = max(1, min(fits, self.size * GROWTH, self.most))

    def _learned(self, messages: int, seconds: float) -> float:
        """What one message takes: from the last two sizes, if they differ enough to tell; never more than all of it."""
        whole, last = seconds / messages, self._last
        self._last = (messages, seconds)
        if last is None:
            return whole
        if abs(messages - last[0]) * 10 >= max(messages, last[0]):
            return min(whole, max(0.0, (seconds - last[1]) / (messages - last[0])))
        usual = last[1] + (messages - last[0]) * self._each
        return whole if seconds > 2 * usual else min(whole, self._each)
