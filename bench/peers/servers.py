"""Servers of peers: each on a free port of this machine, with its files in a temporary directory, gone afterwards."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from bench.peers.peer import NotInstalled

PATIENCE = 60.0
"""Seconds until a server has to answer, and until it has to end."""


def program(name: str, package: str) -> str:
    """The path of a server's program."""
    found = shutil.which(name)
    if found is None:
        raise NotInstalled(f"not installed: apt-get install {package}")
    return found


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def home(of: str) -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix=f"custody-bench-{of}-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def running(
    command: Sequence[str],
    port: int,
    answers: Callable[[], object] = lambda: None,
    *,
    files: Path,
    env: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """A server process, from when it listens on the port and `answers` raises no error any more."""
    with open(files / "output", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=files, env=env, start_new_session=True)
        try:
            _wait_until_it(port, answers, process, files / "output")
            yield
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_it(port: int, answers: Callable[[], object], process: subprocess.Popen[bytes], output: Path) -> None:
    until = monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            answers()
            return
        except Exception as error:
            if process.poll() is not None or monotonic() > until:
                raise RuntimeError(f"{process.args} did not start:\n{output.read_text()[-2000:]}") from error
        sleep(0.05)
