"""Pictures as inline SVG: the lag of the last hour, and the state of the messages of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from custody.dashboard.watch import HOUR
from custody.model.insights import OffsetMap

HEIGHT = 24
"""Of the picture of a partition; it is as wide as it has bins."""
LEAST = 5
"""Of a state in a bin: one dead message among thousands has to be seen."""
STATES = {
    "dead": "dead",
    "waiting": "waiting for a retry",
    "parked": "behind a key",
    "in_flight": "in flight",
}


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


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A state within a bin."""

    kind: str
    y: float
    height: float


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A bin with messages that are neither done nor new: its bars from the top, and what it says in words."""

    x: int
    bars: tuple[Bar, ...]
    first_offset: int
    until_offset: int
    words: str

    @property
    def single(self) -> bool:
        return self.until_offset - self.first_offset == 1


@dataclass(frozen=True, kw_only=True)
class Strip:
    """A partition: done up to `done`, and behind that never delivered, with cells for all else."""

    of: OffsetMap
    width: float
    done: float
    cells: tuple[Cell, ...]
    words: str


def strip(of: OffsetMap) -> Strip:
    """The picture of a partition. It has as many cells for ten million messages as for two hundred."""
    width = max(1.0, (of.until_offset - of.first_offset) / of.width)
    done = min(max(of.frontier, of.first_offset), of.until_offset) - of.first_offset
    counts = [f"{sum(getattr(one, state) for one in of.bins):,} {name}" for state, name in STATES.items()]
    return Strip(
        of=of,
        width=width,
        done=done / of.width,
        cells=tuple(_cell(of, number) for number in range(len(of.bins))),
        words=f"partition {of.partition}, offsets {of.first_offset:,} to {of.until_offset:,}: {', '.join(counts)}, "
        f"{max(0, of.until_offset - max(of.frontier, of.first_offset)):,} not delivered yet",
    )


def _cell(of: OffsetMap, number: int) -> Cell:
    one = of.bins[number]
    until = min(one.first_offset + of.width, of.until_offset)
    bars, top, words = [], 0.0, []
    for state, name in STATES.items():
        count = getattr(one, state)
        if count:
            height = min(HEIGHT - top, max(LEAST, HEIGHT * count / (until - one.first_offset)))
            bars.append(Bar(kind=state, y=top, height=round(height, 2)))
            top += height
            words.append(f"{count:,} {name}")
    said = f"offset {one.first_offset:,}" if of.width == 1 else f"offsets {one.first_offset:,} to {until - 1:,}"
    return Cell(
        x=(one.first_offset - of.first_offset) // of.width,
        bars=tuple(bars),
        first_offset=one.first_offset,
        until_offset=until,
        words=f"{said}: {', '.join(words)}",
    )
