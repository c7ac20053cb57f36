"""`make bench`, or `python -m bench`: every row in one run, on a server of its own that is gone afterwards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

from rich.console import Console

from bench import (
    consuming,
    contention,
    delays,
    fairness,
    footprint,
    growth,
    held_xmin,
    http,
    ordering,
    outbox,
    peers,
    pipelines,
    publishing,
    report,
    scale,
    working,
)
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
    "peers": peers.rows,
    "pipelines": pipelines.rows,
    "scale": scale.rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, and a log of 1 M messages, not 10 M")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs: the figures mean nothing")
    parser.add_argument("--only", action="append", choices=ROWS, metavar="ROW", help=f"one of: {', '.join(ROWS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    parser.add_argument("--url", help="a postgresql:// server whose user may create databases, not an embedded one")
    arguments = parser.parse_args()
    sizes = TINY if arguments.tiny else QUICK if arguments.quick else FULL
    console = Console(stderr=True)
    found: list[Row] = []
    with server(arguments.url) as url:
        stage = Stage(url, sizes)
        facts = stage.facts()
        for name in arguments.only or ROWS:
            start = perf_counter()
            with console.status(f"{name} …") as status:
                for row in ROWS[name](stage):
                    found.append(row)
                    status.update(f"{name}: {row.what.strip()}: {report.number(row.measured)} {row.unit}")
            console.print(f"{name}: {perf_counter() - start:.0f} s", style="dim")
    report.show(Console(width=None if sys.stdout.isatty() else report.WIDTH), found, facts)
    if arguments.json is not None:
        report.write(arguments.json, found, facts)


if __name__ == "__main__":
    main()
