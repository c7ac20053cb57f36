"""What a demo has checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Check:
    what: str
    good: bool
    found: str


def show(console: Console, checks: Sequence[Check], took: float) -> None:
    console.print(f"\n[bold]Checks[/] after {took:.0f} s")
    for check in checks:
        console.print(f"  {'[green]✓' if check.good else '[red]✗'}[/] {check.what}: {check.found}")
