"""Drivers of a pipeline as processes that are really killed: each in a session of its own, with its JVM and workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]

Step = tuple[str, int, str]
"""A step of a batch, at which time that it is reached, and what then happens: kill, kill python, kill java, wait."""


def _paths() -> list[str]:
    given = os.environ.get("PYTHONPATH")
    return [] if given is None else [given]


class Driver:
    """One driver. It starts its JVM at once, and its pipeline when it gets its orders."""

    def __init__(
        self, place: Path, settings: Mapping[str, str] | None = None, environment: Mapping[str, str] = os.environ
    ) -> None:
        place.mkdir()
        self._log = place / "stderr"
        more = [] if settings is None else [json.dumps(settings)]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.spark.driver", *more],
                cwd=place,
                env={**environment, "PYTHONPATH": os.pathsep.join([str(ROOT), *_paths()]), "TMPDIR": str(place)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.said: list[dict[str, Any]] = []
        self._gone = False
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(json.loads(line))

    def _tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def run(
        self,
        url: str,
        *steps: Step,
        drain: str | None = "60s",
        checkpoint: Path | None = None,
        files: Path | None = None,
        table: tuple[str, str] | None = None,
        max_per_batch: int = 1000,
        style: str = "each",
        hold: Mapping[str, str | None] | None = None,
        more: bool = False,
    ) -> None:
        """Starts the pipeline, as soon as the JVM is there. `more`: it waits for other orders afterwards."""
        self.reaches("ready", timeout=90)
        self.said[:] = [one for one in self.said if one.get("at") != "end"]
        orders = {"url": url, "steps": steps, "drain": drain, "max_per_batch": max_per_batch}
        orders |= {"style": style, "hold": hold, "more": more, "table": table}
        paths = {"checkpoint": checkpoint, "files": files}
        self._tell(json.dumps({**orders, **{name: path and str(path) for name, path in paths.items()}}))

    def reaches(self, step: str, timeout: float = 60) -> None:
        """Waits until it says that it is at this step."""
        wait_for(
            lambda: any(one.get("at") == step for one in self.said) or self._ended(step),
            lambda: f"the driver did not reach {step!r}: {self.story()}",
            timeout,
        )

    def _ended(self, step: str) -> bool:
        assert self.process.poll() is None, f"the driver ended before {step!r}: {self.story()}"
        return False

    def go_on(self) -> None:
        """Ends a wait."""
        self.said[:] = [one for one in self.said if one.get("deed") != "wait"]
        self._tell("")

    def committed(self) -> list[int]:
        """The claims that it says it has committed."""
        return [one["batch"] for one in list(self.said) if "batch" in one]

    def lost(self) -> int:
        """The messages of which it says that their lease was gone."""
        return sum(one["lost"] for one in list(self.said) if "batch" in one)

    def troubles(self) -> int:
        """How often it said that something does not work."""
        return sum("trouble" in one for one in list(self.said))

    def ends(self, timeout: float = 120) -> dict[str, Any]:
        """Waits for its end, and returns what it said of it; nothing if it was killed."""
        wait_for(lambda: self.process.poll() is not None, lambda: f"the driver does not end: {self.story()}", timeout)
        self._listener.join(10)
        return self.said[-1] if self.said and self.said[-1].get("at") == "end" else {}

    def dies(self, timeout: float = 120) -> None:
        """Waits until it has ended because something of it was killed, and clears away what outlived it."""
        self.ends(timeout)
        assert self.process.returncode != 0, self.story()
        self.kill()

    def is_killed_after(self, moment: float) -> None:
        """Kills it so many seconds from now, whatever it is at."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(moment)
        self.kill()

    def has_run(self, timeout: float = 120) -> dict[str, Any]:
        """Waits for the end of a run after which it goes on living, and returns what it said of it."""
        self.reaches("end", timeout)
        return next(one for one in self.said if one.get("at") == "end")

    def finishes(self, timeout: float = 120) -> dict[str, Any]:
        """Waits for its end, which has to be a good one; returns its summary."""
        end = self.ends(timeout)
        assert self.process.returncode == 0, self.story()
        summary: dict[str, Any] = end["summary"]
        return summary

    def stop(self) -> None:
        """Holds every process of it where it is."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9 of the Python process, the JVM and all workers; returns when none is left."""
        if self._gone:  # its number may be somebody else's by now
            return
        self._signal(signal.SIGKILL)
        self.process.wait(10)
        wait_for(lambda: not self._signal(signal.SIGKILL), "a process cannot be killed")
        self._gone = True
        self._listener.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _signal(self, number: signal.Signals) -> list[int]:
        found = list(in_session(self.process.pid))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return found

    def story(self) -> str:
        """What it said and logged, for people."""
        lines = [json.dumps(one) for one in self.said[-20:]]
        return "\n".join([f"exit code {self.process.poll()}", *lines, self._log.read_text()[-6000:]])


def in_session(leader: int) -> Iterator[int]:
    """The living processes of a session: workers have a process group of their own, but never leave the session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # the name in brackets may contain anything; behind it: state, parent, process group, session
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                yield int(entry.name)


class Drivers:
    """Gives out drivers, and starts the JVM of the next one meanwhile."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._all: list[Driver] = []
        self._next: Driver | None = None

    def _start(self) -> Driver:
        driver = Driver(self._place / f"driver-{len(self._all)}")
        self._all.append(driver)
        return driver

    def take(self, *, more: bool = True) -> Driver:
        """A driver that waits for its orders. `more`: another one will be wanted."""
        taken, self._next = self._next or self._start(), self._start() if more else None
        return taken

    def close(self) -> None:
        for driver in self._all:
            driver.kill()
