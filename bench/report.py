"""What a run found: rows of figures, as JSON for programs. console.py and markdown.py show them to people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """A bound on a figure."""

    bound: float
    at_most: bool = False

    def met_by(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


def at_least(bound: float) -> Target:
    return Target(bound)


def at_most(bound: float) -> Target:
    return Target(bound, at_most=True)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, what it should be, and its ratio to what was measured beside it."""

    what: str
    measured: float
    unit: str
    target: Target | None = None
    beside: str | None = None
    other: float | None = None
    ratio: float | None = None
    ratio_target: Target | None = None
    note: str | None = None

    @property
    def passed(self) -> bool | None:
        """None for a figure without a target."""
        verdicts = [
            target.met_by(value)
            for target, value in ((self.target, self.measured), (self.ratio_target, self.ratio))
            if target is not None and value is not None
        ]
        return all(verdicts) if verdicts else None


def judged(row: Row) -> Iterator[tuple[str, str, bool]]:
    """Each target of a row: what was found, what is wanted, and whether it is met."""
    if row.target is not None:
        yield f"{number(row.measured)} {row.unit}", bound(row.target), row.target.met_by(row.measured)
    if row.ratio_target is not None and row.ratio is not None:
        yield f"{row.ratio:.2f} of {row.beside}", bound(row.ratio_target), row.ratio_target.met_by(row.ratio)


def number(value: float) -> str:
    if value >= 100_000:
        return f"{value / 1000:,.0f}k"
    if value >= 1000:
        return f"{value / 1000:,.1f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def bound(target: Target | None) -> str:
    return "" if target is None else f"{'≤' if target.at_most else '≥'} {number(target.bound)}"


def write(path: Path, rows: Sequence[Row], facts: Mapping[str, str], notes: Sequence[str]) -> None:
    found = {"facts": facts, "notes": notes, "rows": [{**asdict(row), "passed": row.passed} for row in rows]}
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
