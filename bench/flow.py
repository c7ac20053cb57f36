"""Producers and consumers at once, each a process of its own, at a steady rate through a topic that drops its past."""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from statistics import linear_regression
from time import perf_counter, sleep
from typing import Any

import custody
from bench.sizes import KEYS
from bench.stage import plain
from custody import Outgoing, Policy, Retention

TOPIC, GROUP = "flow", "sink"
PARTITIONS = 4
BATCH = 1000
SEGMENTS = 8
"""How many segments hold what retention keeps."""
PATIENCE = 60.0
"""Seconds for the consumers to finish after the last publish."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What flows. `keep` and `journal` are the bytes that retention keeps of the log and of the journal."""

    seconds: float
    rate: int
    bytes: int = 1000
    producers: int = 2
    consumers: int = 2
    keep: int = 2**30
    journal: int = 2**26


@dataclass(frozen=True)
class Sample:
    """What has happened some seconds after the start, and the bytes on disk then."""

    at: float
    published: int
    consumed: int
    log: int
    journal: int

    @property
    def backlog(self) -> int:
        return self.published - self.consumed


@dataclass
class Course:
    """How it went."""

    flow: Flow
    samples: list[Sample] = field(default_factory=list)
    upkeep: Counter[str] = field(default_factory=Counter)
    published: int = 0
    consumed: int = 0

    @property
    def steady(self) -> list[Sample]:
        """Without the first tenth, in which processes start."""
        return [sample for sample in self.samples if sample.at >= self.flow.seconds / 10]

    @property
    def rate_in(self) -> float:
        return _slope(self.steady, [sample.published for sample in self.steady])

    @property
    def rate_out(self) -> float:
        return _slope(self.steady, [sample.consumed for sample in self.steady])

    @property
    def slope(self) -> float:
        """Messages a second by which the backlog grows."""
        return _slope(self.steady, [sample.backlog for sample in self.steady])

    @property
    def slack(self) -> float:
        """A slope that is taken for none: the messages of one second over the whole run."""
        return self.flow.rate / self.flow.seconds

    def report(self) -> str:
        lines = [
            f"{self.published:,} messages of {self.flow.bytes:,} bytes in {self.flow.seconds:g} s;"
            f" in {self.rate_in:,.0f} and out {self.rate_out:,.0f} a second;"
            f" the backlog grows by {self.slope:,.1f} a second; upkeep: {dict(self.upkeep)}"
        ]
        for sample in self.samples[:: max(1, len(self.samples) // 10)]:
            lines.append(
                f"{sample.at:7.1f} s: {sample.published:>12,} in, backlog {sample.backlog:>9,},"
                f" log {sample.log / 2**20:8.1f} MB, journal {sample.journal / 2**20:6.1f} MB"
            )
        return "\n".join(lines)


def _slope(samples: list[Sample], values: list[int]) -> float:
    return linear_regression([sample.at for sample in samples], values).slope


def run(url: str, flow: Flow) -> Course:
    """Lets it flow for the time, then until everything is consumed."""
    course = Course(flow)
    context = multiprocessing.get_context("spawn")
    published = [context.Value("q", 0, lock=False) for _ in range(flow.producers)]
    consumed = [context.Value("q", 0, lock=False) for _ in range(flow.consumers)]
    started, stop, end = context.Barrier(flow.producers + 1), context.Event(), context.Event()
    with custody.connect(url) as c:
        c.create_topic(
            TOPIC,
            partitions=PARTITIONS,
            retention=Retention(size=flow.keep, segment_size=flow.keep // SEGMENTS),
        )
        c.set_journal_retention(size=flow.journal)
        c.create_group(TOPIC, GROUP, Policy(ordering="none"))
        producers = [context.Process(target=produce, args=[url, flow, n, started, stop]) for n in published]
        consumers = [context.Process(target=consume, args=[url, n, end]) for n in consumed]
        with _alive([*producers, *consumers], stop, end) as check:
            started.wait(PATIENCE)
            began = perf_counter()
            while (at := perf_counter() - began) < flow.seconds:
                check()
                course.upkeep.update(step.did for step in c.maintain())
                counts = sum(n.value for n in published), sum(n.value for n in consumed)
                course.samples.append(Sample(at, *counts, *_on_disk(url)))
                sleep(max(0.0, min(1.0, flow.seconds / 50) - (perf_counter() - began - at)))
            stop.set()
            for process in producers:
                process.join(PATIENCE)
            until = perf_counter() + PATIENCE
            while sum(n.value for n in consumed) < sum(n.value for n in published) and perf_counter() < until:
                check()
                sleep(0.05)
        course.upkeep.update(step.did for step in c.maintain())
    course.published, course.consumed = sum(n.value for n in published), sum(n.value for n in consumed)
    return course


@contextmanager
def _alive(processes: list[BaseProcess], stop: Event, end: Event) -> Iterator[Any]:
    """The processes run, and are gone afterwards. Gives a call that raises if one of them has failed."""

    def check() -> None:
        for process in processes:
            if process.exitcode not in (None, 0):
                raise RuntimeError(f"{process.name} ended with {process.exitcode}")

    for process in processes:
        process.start()
    try:
        yield check
    finally:
        stop.set()
        end.set()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    check()


def produce(url: str, flow: Flow, published: Any, started: Any, stop: Event) -> None:
    """One producer: a share of the rate, in batches. What it is behind with it makes up for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops it
    batch = [Outgoing(b"x" * flow.bytes, key=f"key-{number % KEYS}") for number in range(BATCH)]
    pause = BATCH * flow.producers / flow.rate
    with custody.connect(url) as c:
        started.wait(PATIENCE)
        due = perf_counter()
        while not stop.is_set():
            c.publish_many(TOPIC, batch)
            published.value += BATCH
            due += pause
            if due > perf_counter():
                stop.wait(due - perf_counter())


def consume(url: str, consumed: Any, end: Event) -> None:
    """One consumer, with an ack in each claim."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with custody.connect(url) as c:
        while not end.is_set():
            lease = c.claim(TOPIC, GROUP, max_messages=BATCH)
            while lease:
                taken = len(lease)
                lease = lease.next()
                consumed.value += taken
            end.wait(0.005)


def _on_disk(url: str) -> tuple[int, int]:
    """The bytes of the log and of the journal."""
    with plain(url) as connection:
        rows = connection.execute(
            """SELECT coalesce(sum(pg_total_relation_size(oid)) FILTER (WHERE relname ~ '^log_\\d+$'), 0)::bigint,
                      coalesce(sum(pg_total_relation_size(oid)) FILTER (WHERE relname ~ '^journal_\\d+$'), 0)::bigint
               FROM pg_class WHERE relnamespace = 'custody'::regnamespace AND relkind = 'r'"""
        ).fetchall()
    return int(str(rows[0][0])), int(str(rows[0][1]))
