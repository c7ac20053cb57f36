"""The stage of a demo: a directory, an embedded database and processes, which are gone however the demo ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import custody


class Interruptions:
    """Ctrl-C, SIGTERM and SIGHUP as exceptions, but not while something is made or removed. Only the first counts."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._shields = 0

    @contextmanager
    def noticed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Delays a signal until the block has ended."""
        unseen, self._shields = self._first is None, self._shields + 1
        try:
            yield
        finally:
            self._shields -= 1
            if unseen and self._first is not None and not self._shields:
                self._end()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._first is None:
            self._first = number
            if not self._shields:
                self._end()

    def _end(self) -> None:
        if self._first == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self._first or 0))


@dataclass(kw_only=True, eq=False)
class Stage:
    directory: Path
    interruptions: Interruptions
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _opened: custody.Custody | None = None

    @property
    def c(self) -> custody.Custody:
        """The database, which is started at the first use."""
        if self._opened is None:
            with self.interruptions.shielded():  # kept before a signal that came meanwhile ends the demo
                self._opened = custody.connect(home=self.directory / "home", worker="operator")
        return self._opened

    def start(self, command: Sequence[str], log: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a process in a group of its own. Its stdin is a pipe that is closed when the demo has ended."""
        with self.interruptions.shielded(), (self.directory / log).open("ab") as output:
            process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            self._started.append(process)
            return process

    def last_words(self, log: str) -> str:
        """The last line of a process."""
        lines = (self.directory / log).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def clear(self) -> None:
        """Ends the processes and the server."""
        for process in self._started:
            kill(process)
        if self._opened is not None:
            self._opened.close()


def end_with_the_demo() -> None:
    """Ends this process, which a stage has started, when the demo has ended, however that was."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all of its group with -9."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    if process.stdin is not None:
        process.stdin.close()


@contextmanager
def stage(home: Path | None = None) -> Iterator[Stage]:
    """A stage. At its end processes are killed and the server is stopped; unless `home` is given, all is removed."""
    interruptions = Interruptions()
    made: list[Path] = []
    opened: list[Stage] = []
    with interruptions.noticed():
        try:
            with interruptions.shielded():
                made.append(directory := home or Path(tempfile.mkdtemp(prefix="custody-demo-")))
                directory.chmod(0o711)  # if we are root, the server runs as another user, who must be able to enter
                opened.append(Stage(directory=directory, interruptions=interruptions))
            yield opened[0]
        finally:
            with interruptions.shielded():
                for each in opened:
                    each.clear()
                if home is None:
                    for directory in made:
                        shutil.rmtree(directory, ignore_errors=True)
