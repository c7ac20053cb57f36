"""Rows that put one figure beside many others, as a table with a column for each of those."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.report import Row, number


@dataclass(frozen=True)
class Pivot:
    """Figures of one unit, each beside the same others."""

    unit: str
    others: list[str]
    lines: dict[str, list[Row]] = field(default_factory=dict)

    @property
    def head(self) -> list[str]:
        return [self.unit, "Custody", *self.others]

    def cells(self) -> Iterator[list[str]]:
        """The lines of the table: what, our figure, and for each other its figure and how many times ours is that."""
        for what, rows in self.lines.items():
            yield [what, number(rows[0].measured), *map(_cell, rows)]


def _cell(row: Row) -> str:
    if row.other is None:
        return "–"
    return number(row.other) + ("" if row.ratio is None else f" ({_times(row.ratio)} ×)")


def _times(ratio: float) -> str:
    return f"{ratio:.2g}" if ratio < 10 else number(round(ratio))


def parted(rows: Sequence[Row]) -> tuple[list[Row], list[Pivot]]:
    """The rows with a figure of their own, and those that share one."""
    by_figure: dict[str, list[Row]] = {}
    for row in rows:
        by_figure.setdefault(row.what, []).append(row)
    pivots: list[Pivot] = []
    for what, same in by_figure.items():
        if len(same) > 1:
            others = [row.beside or "" for row in same]
            if not pivots or pivots[-1].others != others:
                pivots.append(Pivot(same[0].unit, others))
            pivots[-1].lines[what] = same
    return [row for row in rows if len(by_figure[row.what]) == 1], pivots
