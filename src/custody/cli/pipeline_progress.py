"""Progress of running pipelines: a live table on a terminal, elsewhere lines about their batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from custody.cli import render
from custody.cli.session import Session, counted
from custody.errors import CustodyError

if TYPE_CHECKING:
    from rich.table import Table

    from custody import Custody
    from custody.spark.figures import Batch
    from custody.spark.pipeline import Pipeline
    from custody.verbs.pipelines import Figures

COLUMNS = [
    "pipeline",
    "batch",
    "rows",
    "rows/s",
    "failed",
    "released",
    "done",
    "lag",
    "waiting",
    "dead",
    "blocked keys",
]
EVERY, IDLE = 1.0, 5.0
"""Seconds between two queries of a group's state: after a batch, and without one."""


class Course:
    """One pipeline: its unreported batches, its totals, and the state of its group."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.untold: list[Batch] = []
        self.last: Batch | None = None
        self.figures: Figures | None = None
        self.looked_at = -IDLE
        self.done = 0

    def add(self, batch: Batch) -> None:
        self.untold.append(batch)
        self.last = batch
        self.done += batch.committed.done

    def look(self, c: Custody) -> None:
        """Queries the group. The database may be unavailable, or the group may not exist yet."""
        self.looked_at = time.monotonic()
        with suppress(CustodyError):
            self.figures = c.figures(self.pipeline.source, self.pipeline.group)

    def row(self) -> list[object]:
        """The cells of the table: the last batch, and the group."""
        if self.last is None:
            batch: list[object] = [None] * 5
        else:
            committed = self.last.committed
            batch = [
                self.last.claim,
                committed.messages,
                round(self.last.rate),
                committed.failed,
                committed.released,
            ]
        group = self.figures
        standing = [None] * 4 if group is None else [group.lag, group.waiting, group.dead, group.blocked_keys]
        return [self.pipeline.name, *batch, self.done, *standing]

    def line(self) -> str:
        """One line about the batches since the last line, and the group."""
        batches, self.untold = self.untold, []
        first, last = batches[0].claim, batches[-1].claim
        total = {name: sum(getattr(batch.committed, name) for batch in batches) for name in vars(batches[0].committed)}
        rate = total["messages"] / max(0.001, sum(batch.took for batch in batches))
        parts = [
            f"{self.pipeline.name}: {f'batch {last}' if first == last else f'batches {first}–{last}'}",
            f"{counted(total['messages'], 'row')}, {rate:,.0f}/s",
            f"{total['failed']:,} failed",
            f"{total['released']:,} released",
            f"{self.done:,} done in all",
        ]
        if self.figures is not None:
            group = self.figures
            lag = f"{group.lag:,} not matched yet" if group.bound else f"lag {group.lag:,}"
            parts += [lag, f"{group.waiting:,} waiting", f"{group.dead:,} dead"]
            parts.append(counted(group.blocked_keys, "blocked key"))
        return " · ".join(parts)


class Progress:
    """Reports running pipelines. Their threads call `batch`."""

    def __init__(self, session: Session, c: Custody, pipelines: Sequence[Pipeline], stop: threading.Event) -> None:
        self._session, self._c, self._stop = session, c, stop
        self._courses = {pipeline.name: Course(pipeline) for pipeline in pipelines}
        self._ended = threading.Event()
        self._live = session.progresses()

    def batch(self, batch: Batch) -> None:
        self._courses[batch.pipeline].add(batch)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Shows progress while the block runs."""
        watcher = threading.Thread(target=self._watch, name="custody-progress", daemon=True)
        with self._table_shown() if self._live else self._lines_shown():
            watcher.start()
            try:
                yield
            finally:
                self._ended.set()
                watcher.join()

    @contextmanager
    def _table_shown(self) -> Iterator[None]:
        from rich.live import Live

        console = render.console(color=self._session.color, stderr=True)
        with Live(get_renderable=self._table, console=console, transient=True):
            yield

    @contextmanager
    def _lines_shown(self) -> Iterator[None]:
        if not self._session.json:
            self._session.note(f"running {', '.join(self._courses)}; SIGTERM or Ctrl-C stops")
        yield
        self._tell(at_the_end=True)

    def _table(self) -> Table:
        table = render.table(COLUMNS, [course.row() for course in self._courses.values()])
        table.caption_justify = "left"
        table.caption = (
            "stopping after the running batch; Ctrl-C again ends at once" if self._stop.is_set() else "Ctrl-C stops"
        )
        return table

    def _watch(self) -> None:
        while not self._ended.wait(0.25):
            if self._live:
                for course in self._courses.values():
                    since = time.monotonic() - course.looked_at
                    if since >= (EVERY if course.untold else IDLE):
                        course.untold.clear()
                        course.look(self._c)
            else:
                self._tell()

    def _tell(self, *, at_the_end: bool = False) -> None:
        for course in self._courses.values():
            if self._session.json or self._session.quiet:
                course.untold.clear()
            elif course.untold and (at_the_end or time.monotonic() - course.looked_at >= EVERY):
                course.look(self._c)
                self._session.note(course.line())
