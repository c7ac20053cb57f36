"""HTTP: one message a request with and without coalescing, batches, receive and ack; how long each takes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

import custody
from bench.measure import Samples
from bench.report import Row, at_least
from bench.sizes import PAYLOAD_BYTES
from bench.stage import Stage

CONNECTIONS = (1, 16, 64)
TARGET = 5
"""With 64 connections: so many times as much as without coalescing."""
PUBLISHED, RECEIVED = 6_000, 1_600
"""With 64 connections, messages a second: published, and received and acknowledged."""
FASTEST, REQUESTS = 400_000, 20_000
"""More messages a second than a load receives, and more requests."""


class Place(NamedTuple):
    """Where a server listens, and its process."""

    host: str
    port: int
    process: psutil.Process

    def cpu_seconds(self) -> float:
        used = self.process.cpu_times()
        return float(used.user + used.system)


@contextmanager
def serving(url: str, *arguments: str) -> Iterator[Place]:
    """A server process."""
    command = [sys.executable, "-m", "custody", "--json", "--database", url, "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        parts = urlsplit(json.loads(server.stdout.readline())["url"])
        try:
            yield Place(str(parts.hostname), int(parts.port or 0), psutil.Process(server.pid))
        finally:
            server.terminate()
            server.wait(30)


def load(place: Place, connections: int, seconds: float, **what: object) -> dict[str, float]:
    """What the client found, and the microseconds of CPU that the server took for a message."""
    command = [sys.executable, "-m", "bench.load", place.host, str(place.port), str(connections), str(seconds)]
    given = json.dumps({"payload": "x" * PAYLOAD_BYTES, **what})
    before = place.cpu_seconds()
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return {**found, "cpu": (place.cpu_seconds() - before) * 1e6 / max(1.0, found["messages"] * seconds)}


def rows(stage: Stage) -> Iterator[Row]:
    seconds = stage.sizes.http_seconds
    with (
        stage.database() as url,
        custody.connect(url) as c,
        serving(url) as together,
        serving(url, "--no-coalesce") as apart,
    ):
        c.create_topic("bench")
        c.create_group("bench", "bench", start="latest")
        for connections in CONNECTIONS:
            yield published(stage, together, apart, connections, seconds)
        for batch in (100, 1000):
            found = load(together, 4, seconds, kind="publish", batch=batch)
            yield Row(
                what=f"HTTP publish, batch {batch:,}, 4 connections",
                measured=found["messages"],
                unit="msg/s",
                note=_times(found),
            )
        for connections, batch in ((1, 1), (16, 1), (64, 1), (4, 100), (4, 1000)):
            yield received(c, together, connections, batch, seconds)


def published(stage: Stage, together: Place, apart: Place, connections: int, seconds: float) -> Row:
    """One message a request, both servers in turn."""
    rates = {True: Samples(), False: Samples()}
    last: dict[bool, dict[str, float]] = {}
    for repetition in range(stage.sizes.repetitions):
        for coalesced in (True, False) if repetition % 2 else (False, True):
            last[coalesced] = load(together if coalesced else apart, connections, seconds, kind="publish", batch=1)
            rates[coalesced].values.append(last[coalesced]["messages"])
    with_, without = rates[True].median, rates[False].median
    return Row(
        what=f"HTTP publish, one a request, {connections} connection{'s' * (connections > 1)}",
        measured=with_,
        unit="msg/s",
        target=at_least(PUBLISHED) if connections == 64 else None,
        beside="without coalescing",
        other=without,
        ratio=with_ / without,
        ratio_target=at_least(TARGET) if connections == 64 else None,
        note=f"{_times(last[True])}; without: {_times(last[False])}",
    )


def received(c: custody.Custody, place: Place, connections: int, batch: int, seconds: float) -> Row:
    """Receive and ack, beside a receive that acks the one before."""
    fill(c, connections, batch, seconds)
    apart = load(place, connections, seconds, kind="consume", batch=batch)
    fill(c, connections, batch, seconds)
    fused = load(place, connections, seconds, kind="chain", batch=batch)
    return Row(
        what=f"HTTP receive + ack, {batch:,} a request, {connections} connection{'s' * (connections > 1)}",
        measured=apart["messages"],
        unit="msg/s",
        target=at_least(RECEIVED) if connections == 64 else None,
        beside="ack with the next receive",
        other=fused["messages"],
        ratio=apart["messages"] / fused["messages"],
        note=f"{_times(apart)}; with the next receive: {_times(fused)}",
    )


def fill(c: custody.Custody, connections: int, batch: int, seconds: float) -> None:
    """Publishes as much as a load can receive: it must never wait for messages."""
    wanted = int(min(FASTEST, REQUESTS * batch) * seconds) + connections * batch
    found = c.stats("bench", "bench").depth
    for _ in range(found, wanted, 1000):
        c.publish_many("bench", ["x" * PAYLOAD_BYTES] * 1000)


def _times(found: dict[str, float]) -> str:
    return f"p50 {found['p50']:.1f} ms, p99 {found['p99']:.1f} ms, {found['cpu']:.0f} µs of CPU a message"
