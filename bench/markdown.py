"""Writes the figures of a run as Markdown: into a file of its own, or between the marks of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.pivot import parted
from bench.report import Row, bound, number

BEGIN, END = "<!-- figures of `make bench` -->\n", "<!-- end of the figures -->\n"


def require_place(path: Path) -> None:
    """Refuses a page that has no marks, before hours were spent on its figures."""
    if path.exists() and not _marks(path.read_text()):
        raise SystemExit(f"{path} has no {BEGIN.strip()} followed by {END.strip()}: add both lines, or name a new file")


def write(path: Path, rows: Sequence[Row], facts: Mapping[str, str], notes: Sequence[str], command: str) -> None:
    made = page(rows, facts, notes, command)
    if path.exists():
        text = path.read_text()
        begin, end = _marks(text) or (0, len(text))
        made = text[:begin] + made + text[end:]
    path.write_text(made)


def _marks(text: str) -> tuple[int, int] | None:
    begin, end = text.find(BEGIN), text.find(END)
    return (begin, end + len(END)) if 0 <= begin < end else None


def page(rows: Sequence[Row], facts: Mapping[str, str], notes: Sequence[str], command: str) -> str:
    plain, pivots = parted(rows)
    parts = [f"`{command}`: {' · '.join(facts.values())}."]
    if plain:
        parts.append(_table(HEAD, map(_line, plain)))
    parts += [_table(pivot.head, pivot.cells()) for pivot in pivots]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return BEGIN + "\n" + "\n\n".join(parts) + "\n\n" + END


HEAD = ("what", "measured", "target", "beside", "that", "ratio", "target", "")


def _line(row: Row) -> list[str]:
    return [
        row.what.strip() + (f" ({row.note})" if row.note else ""),
        f"{number(row.measured)} {row.unit}",
        bound(row.target),
        row.beside or "",
        "" if row.other is None else number(row.other),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        bound(row.ratio_target),
        {None: "", True: "met", False: "missed"}[row.passed],
    ]


def _table(head: Sequence[str], lines: Iterator[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |".replace("  ", " ") for line in (head, ["---"] * len(head), *lines))
