"""Where a row is measured: a server for the run, and a database of its own for each row."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import count
from pathlib import Path
from time import perf_counter
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg import sql

import custody
from bench.measure import Samples
from bench.sizes import Sizes
from custody.store.embedded import acquire

ROOT = Path(__file__).parents[1]
Connection = psycopg.Connection[tuple[object, ...]]


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """The URL given, or an embedded PostgreSQL with its usual settings that is gone afterwards."""
    if url is not None:
        yield url
        return
    home = Path(tempfile.mkdtemp(prefix="custody-bench-"))
    home.chmod(0o711)  # run by root, the server has a user of its own
    try:
        with acquire(home) as embedded:
            yield embedded.url
    finally:
        shutil.rmtree(home, ignore_errors=True)


class Stage:
    """The run's server and sizes; hands out fresh databases."""

    def __init__(self, url: str, sizes: Sizes) -> None:
        self.url = url
        self.sizes = sizes
        self.notes: list[str] = []
        """What a reader of the figures has to know besides, for example what is not installed."""
        self._names = (f"custody_bench_{os.getpid()}_{number}" for number in count())

    @contextmanager
    def database(self) -> Iterator[str]:
        """A fresh database, dropped afterwards; pending writes of the rows before are out of the way."""
        name = next(self._names)
        self._execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            self._execute(sql.SQL("CHECKPOINT"))
            parts = urlsplit(self.url)
            yield urlunsplit(parts._replace(path=f"/{name}"))
        finally:
            self._execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    @contextmanager
    def open(self) -> Iterator[tuple[custody.Custody, Connection]]:
        """Custody on a fresh database, and a plain connection to it."""
        with self.database() as url, custody.connect(url, worker="bench") as c, plain(url) as connection:
            yield c, connection

    def _execute(self, statement: sql.SQL | sql.Composed) -> None:
        with plain(self.url) as connection:
            connection.execute(statement)

    def facts(self) -> dict[str, str]:
        """What the figures depend on."""
        with plain(self.url) as connection:
            postgresql = str(connection.info.parameter_status("server_version"))
            fsync = str(connection.execute("SHOW fsync").fetchall()[0][0])
        return {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "version": f"Custody {_revision()}",
            "cores": f"{os.cpu_count()} cores of {_processor()}, {_memory_gb():.0f} GB",
            "python": f"Python {platform.python_version()}",
            "postgresql": f"PostgreSQL {postgresql}",
            "fsync": f"fsync {fsync}",
            "commit": f"a small commit takes {self._commit_ms():.2f} ms",
        }

    def _commit_ms(self) -> float:
        times = Samples()
        with self.database() as url, plain(url) as connection:
            connection.execute("CREATE TABLE commits (n int)")
            for number in range(200):
                start = perf_counter()
                connection.execute("INSERT INTO commits VALUES (%s)", [number])
                times.values.append((perf_counter() - start) * 1000)
        return times.median


def _revision() -> str:
    """The version, and the commit that was measured if this is a checkout."""
    if shutil.which("git") is None:
        return version("custody")
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return f"{version('custody')} {described.stdout.strip()}".rstrip()


def _processor() -> str:
    names = (
        re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else []
    )
    return names[0] if names else platform.machine()


def _memory_gb() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9


@contextmanager
def plain(url: str) -> Iterator[Connection]:
    with psycopg.connect(url, autocommit=True, prepare_threshold=0) as connection:
        yield connection
