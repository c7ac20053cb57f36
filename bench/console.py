"""Tables of a run for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.pivot import Pivot, parted
from bench.report import Row, bound, judged, number


def _verdict(passed: bool | None) -> str:
    return {None: "", True: "[green]met[/]", False: "[red bold]missed[/]"}[passed]


def table(rows: Sequence[Row]) -> Table:
    shown = Table()
    shown.add_column("what", no_wrap=True)
    shown.add_column("measured", justify="right", no_wrap=True)
    shown.add_column("target", justify="right", no_wrap=True)
    shown.add_column("beside", no_wrap=True)
    shown.add_column("that", justify="right", no_wrap=True)
    shown.add_column("ratio", justify="right", no_wrap=True)
    shown.add_column("target", justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.what if row.note is None else f"{row.what}\n  [dim]{row.note}[/]",
            f"{number(row.measured)} {row.unit}",
            bound(row.target),
            row.beside or "",
            "" if row.other is None else f"{number(row.other)} {row.unit}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            bound(row.ratio_target),
            _verdict(row.passed),
        )
    return shown


def beside_each_other(pivot: Pivot) -> Table:
    shown = Table()
    for number_of, name in enumerate(pivot.head):
        shown.add_column(name, justify="right" if number_of else "left")
    for cells in pivot.cells():
        shown.add_row(*cells)
    return shown


def targets(rows: Sequence[Row]) -> Table:
    """Every figure that has a target, and nothing else."""
    shown = Table(title="Targets", title_justify="left", title_style="")
    for name, justify in (("what", "left"), ("found", "left"), ("wanted", "right"), ("", "left")):
        shown.add_column(name, justify=justify, no_wrap=True)
    for row in rows:
        for found, wanted, met in judged(row):
            shown.add_row(row.what.strip(), found, wanted, _verdict(met))
    return shown


WIDTH = 170
"""Of a table that goes to a file: as wide as it needs to be."""


def show(console: Console, rows: Sequence[Row], facts: Mapping[str, str], notes: Sequence[str]) -> None:
    plain, pivots = parted(rows)
    console.print(" · ".join(facts.values()), soft_wrap=True)
    if plain:
        console.print(table(plain))
    for pivot in pivots:
        console.print(beside_each_other(pivot))
    for note in notes:
        console.print(escape(note), style="red bold" if "not installed" in note else "", soft_wrap=True)
    met = [met for row in rows for _, _, met in judged(row)]
    if met:
        console.print(targets(rows))
        console.print(f"{sum(met)} of {len(met)} targets met.")
