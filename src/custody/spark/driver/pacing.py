"""The size of the next claim: as many messages as the pipeline processes in the target time of a batch.

A claim is committed as a whole. A claim of 100,000 messages that take a second each would show no result for a day, and
a stop would wait for it. So a pipeline starts with small claims, takes larger ones while its batches are fast, and
smaller ones when a handler or a full sink makes them slow. The fixed cost of a batch is no reason for smaller ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST = 250
"""Messages for each task in the first claim: a second of work at four milliseconds each."""
GROWTH = 4
"""Largest factor from one claim to the next: a fast batch says little about a much larger one."""


@dataclass
class Pace:
    """The size of the next claim, computed from the durations of the last batches."""

    most: int
    aim: float
    """Target duration of a batch in seconds."""
    tasks: int
    size: int = field(init=False)
    _last: tuple[int, float] | None = field(init=False, default=None)
    _each: float = field(init=False, default=0.0)
    """Seconds for one more message, estimated from the last batches."""

    def __post_init__(self) -> None:
        self.size = min(self.most, FIRST * self.tasks)

    def took(self, messages: int, seconds: float) -> None:
        """Records a batch: its number of messages and its duration."""
        self._each = self._learned(messages, seconds)
        fixed = seconds - messages * self._each
        # if the fixed cost dominates, smaller batches would only be more batches
        room = max(self.aim - fixed, self.aim / 2)
        fits = self.most if self._each * self.most <= room else int(room / self._each)
        if fits < self.size or messages * 2 > self.size:  # a much smaller batch says nothing about a full one
            self.size = max(1, min(fits, self.size * GROWTH, self.most))

    def _learned(self, messages: int, seconds: float) -> float:
        """Seconds for one message, at most the average: the slope between two batches if their sizes differ enough."""
        whole, last = seconds / messages, self._last
        self._last = (messages, seconds)
        if last is None:
            return whole
        if abs(messages - last[0]) * 10 >= max(messages, last[0]):
            return min(whole, max(0.0, (seconds - last[1]) / (messages - last[0])))
        usual = last[1] + (messages - last[0]) * self._each
        return whole if seconds > 2 * usual else min(whole, self._each)
