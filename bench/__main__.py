"""`make bench`, or `python -m bench`: every row in one run, on a server of its own that is gone afterwards."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from rich.console import Console

from bench import (
    console,
    consuming,
    contention,
    delays,
    fairness,
    footprint,
    growth,
    held_xmin,
    http,
    markdown,
    ordering,
    outbox,
    pipelines,
    publishing,
    report,
    scale,
    sustained,
    working,
)
from bench.peers import comparison
from bench.report import Row
from bench.sizes import FULL, QUICK, TINY
from bench.stage import Stage, server

ROWS: dict[str, Callable[[Stage], Iterator[Row]]] = {
    "publishing": publishing.rows,
    "consuming": consuming.rows,
    "ordering": ordering.rows,
    "contention": contention.rows,
    "fairness": fairness.rows,
    "growth": growth.rows,
    "footprint": footprint.rows,
    "held-xmin": held_xmin.rows,
    "working": working.rows,
    "delays": delays.rows,
    "outbox": outbox.rows,
    "http": http.rows,
    "sustained": sustained.rows,
    "peers": comparison.rows,
    "pipelines": pipelines.rows,
    "scale": scale.rows,
}

MARKDOWN = "also write the figures as Markdown, into a new file or between the marks of a page"


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, and a log of 1 M messages, not 10 M")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs: the figures mean nothing")
    parser.add_argument("--only", action="append", choices=ROWS, metavar="ROW", help=f"one of: {', '.join(ROWS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help=MARKDOWN)
    parser.add_argument("--seconds", type=float, metavar="S", help="how long `sustained` runs")
    parser.add_argument("--rate", type=int, metavar="N", help="messages a second that `sustained` offers")
    parser.add_argument("--url", help="a postgresql:// server whose user may create databases, not an embedded one")
    arguments = parser.parse_args()
    sizes = TINY if arguments.tiny else QUICK if arguments.quick else FULL
    if not arguments.only:  # a whole run has to end
        sizes = replace(sizes, peer_repetitions=1)
    if arguments.seconds is not None:
        sizes = replace(sizes, sustained_seconds=arguments.seconds)
    if arguments.rate is not None:
        sizes = replace(sizes, sustained_rate=arguments.rate)
    if arguments.markdown is not None:
        markdown.require_place(arguments.markdown)
    progress = Console(stderr=True)
    found: list[Row] = []
    with server(arguments.url) as url:
        stage = Stage(url, sizes)
        facts = stage.facts()
        for name in arguments.only or ROWS:
            start = perf_counter()
            with progress.status(f"{name} …") as status:
                for row in ROWS[name](stage):
                    found.append(row)
                    status.update(f"{name}: {row.what.strip()}: {report.number(row.measured)} {row.unit}")
            progress.print(f"{name}: {perf_counter() - start:.0f} s", style="dim")
    console.show(Console(width=None if sys.stdout.isatty() else console.WIDTH), found, facts, stage.notes)
    if arguments.json is not None:
        report.write(arguments.json, found, facts, stage.notes)
    if arguments.markdown is not None:
        command = f'make bench ARGS="{shlex.join(sys.argv[1:])}"'
        markdown.write(arguments.markdown, found, facts, stage.notes, command)


if __name__ == "__main__":
    main()
