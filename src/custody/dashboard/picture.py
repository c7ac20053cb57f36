"""Pictures as inline SVG: the lag of the last hour, and the state of the messages of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from custody.dashboard.watch import HOUR


@dataclass(frozen=True, kw_only=True)
class Sparkline:
    """A line in a box of 100 by 20: its points, and what it says in words."""

    points: str
    words: str


def sparkline(values: Sequence[tuple[float, int]]) -> Sparkline | None:
    """Values with their ages in seconds; None as long as there are not two of them. The line begins at the left."""
    if len(values) < 2:
        return None
    oldest = min(HOUR, max(age for age, _ in values)) or 1.0
    most = max(value for _, value in values)
    points = " ".join(
        f"{100 * (1 - age / oldest):.1f},{19 - (18 * value / most if most else 0):.1f}" for age, value in values
    )
    minutes = max(1, round(oldest / 60))
    words = f"lag of the last {minutes} min: from {values[0][1]:,} to {values[-1][1]:,}, at most {most:,}"
    return Sparkline(points=points, words=words)
