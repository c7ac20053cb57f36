"""Processes that are really killed, and a ledger of what they did that Custody knows nothing of."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

SCRIPTS = Path(__file__).parent

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """Starts a script of this folder in a process of its own; at the end all are killed and reaped."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: object) -> subprocess.Popen[str]:
        log = (tmp_path / f"{script}-{len(started)}.log").open("w")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-u", str(SCRIPTS / script), *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(10)
            if process.stdout is not None:
                process.stdout.close()
    failures = [log.read_text() for log in tmp_path.glob("*.log") if "Traceback" in log.read_text()]
    assert failures == []


def kill(process: subprocess.Popen[str]) -> None:
    """kill -9, and reaped."""
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL


@dataclass
class Ledger:
    """What workers did, in that order: a table of its own, written outside of Custody's transactions."""

    db: psycopg.Connection[Any]

    def create(self) -> None:
        self.db.execute(
            'CREATE TABLE ledger (n bigserial PRIMARY KEY, "offset" bigint NOT NULL, key text,'
            " attempt int NOT NULL, worker text)"
        )

    def effects(self) -> list[tuple[int, str | None, int, str]]:
        """(offset, key, attempt, worker) of each."""
        return self.db.execute('SELECT "offset", key, attempt, worker FROM ledger ORDER BY n').fetchall()

    def __len__(self) -> int:
        row = self.db.execute("SELECT count(*) FROM ledger").fetchone()
        assert row is not None
        return int(row[0])


@pytest.fixture
def ledger(db: psycopg.Connection) -> Ledger:
    ledger = Ledger(db)
    ledger.create()
    return ledger


def out_of_order(
    effects: list[tuple[int, str | None, int, str]], gone: set[int], published: dict[int, str]
) -> list[str]:
    """Effects that came before an earlier message of their key had its own, unless that one is dead."""
    of_key: dict[str, list[int]] = {}
    for offset, name in sorted(published.items()):
        if offset not in gone:
            of_key.setdefault(name, []).append(offset)
    upcoming = {key: list(reversed(offsets)) for key, offsets in of_key.items()}
    seen: set[int] = set()
    wrong = []
    for offset, key, attempt, worker in effects:
        if offset in seen or offset in gone or key is None:
            continue
        seen.add(offset)
        due = upcoming[key].pop()
        if due != offset:
            wrong.append(f"{key}@{offset} (attempt {attempt}, {worker}) before {key}@{due}")
            upcoming[key].append(due)
            upcoming[key].remove(offset)
    return wrong
