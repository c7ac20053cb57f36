"""Processes of a release that publish and consume, for tests."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.upgrades import traffic
from tests.upgrades.releases import environment
from tests.waiting import wait_for


class Running:
    """One of them, and what it printed last."""

    def __init__(self, package: Path, url: str, name: str, *options: str) -> None:
        self.last: dict[str, Any] = {"rounds": 0}
        self._process = subprocess.Popen(
            [sys.executable, traffic.__file__, url, name, *options],
            env=environment(package),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.last = json.loads(line)

    def goes_on(self, rounds: int = 5) -> None:
        """Waits until it has made so many rounds more."""
        until = self.last.get("rounds", 0) + rounds
        wait_for(
            lambda: self.last["rounds"] >= until or self._process.poll() is not None,
            lambda: f"{self.last} stands still",
        )
        assert self._process.poll() is None, self._process.communicate()[1]

    def end(self) -> dict[str, Any]:
        """Ends it; what it did."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()
        assert self._process.wait(30) == 0, self._process.stderr and self._process.stderr.read()
        self._reader.join()
        return self.last

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()


@contextmanager
def running(package: Path, url: str, name: str, *options: str) -> Iterator[Running]:
    started = Running(package, url, name, *options)
    try:
        yield started
    finally:
        started.kill()
