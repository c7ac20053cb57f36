"""The command line on the fresh database of the test: as it is used, in a process of its own, and within this one."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.databases import Copy, Kept

import custody
import custody.cli

COMMAND = [sys.executable, "-W", "error", "-m", "custody"]
DOCUMENT = (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Answer:
    """What a command said, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document of its output."""
        return json.loads(self.out)

    @property
    def documents(self) -> list[Any]:
        """NDJSON: one document on each line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> dict[str, str]:
        """The error of a command that was run with --json."""
        error: dict[str, str] = json.loads(self.err.splitlines()[-1])["error"]
        assert set(error) == {"code", "message", "remedy"}
        return error


@pytest.fixture
def environment(database_url: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUSTODY_")}
    return {**kept, "CUSTODY_DATABASE": database_url, "COLUMNS": "200", "TERM": "xterm"}


Run = Callable[..., Answer]


@pytest.fixture
def cli(environment: dict[str, str], tmp_path: Path) -> Run:
    """`cli("topics", "list")` runs it and expects exit code 0, or the one given as `code`."""

    def run(*arguments: str, stdin: str | bytes = b"", code: int = 0, **variables: str) -> Answer:
        done = subprocess.run(
            [*COMMAND, *arguments],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            cwd=tmp_path,
            env={**environment, **variables},
            timeout=60,
            check=False,
        )
        answer = Answer(done.returncode, done.stdout.decode(), done.stderr.decode())
        assert answer.code == code, f"exit code {answer.code}\n{answer.out}\n{answer.err}"
        if "CUSTODY_TRACEBACK" not in variables:
            assert "Traceback" not in answer.err
        return answer

    return run


@pytest.fixture
def quick(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The same within this process, without the cost of starting one: for all but what only a process shows."""

    def run(*arguments: str, stdin: str = "", code: int = 0, **variables: str) -> Answer:
        out, err = io.StringIO(), io.StringIO()
        given = tmp_path / "stdin"
        given.write_text(stdin)
        with monkeypatch.context() as patch, given.open() as opened:
            for name in [name for name in os.environ if name.startswith("CUSTODY_")]:
                patch.delenv(name)
            for name, value in {**environment, **variables}.items():
                patch.setenv(name, value)
            patch.chdir(tmp_path)
            patch.setattr(sys, "stdin", opened)
            patch.setattr(sys, "path", list(sys.path))
            with redirect_stdout(out), redirect_stderr(err):
                answer = Answer(custody.cli.run(arguments), out.getvalue(), err.getvalue())
        assert answer.code == code, f"exit code {answer.code}\n{answer.out}\n{answer.err}"
        assert "Traceback" not in answer.err
        return answer

    return run


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command that goes on until it is told to stop."""
    started: list[subprocess.Popen[str]] = []

    def launch(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=environment,
            text=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def live(database: Kept | Copy) -> Iterator[custody.Custody]:
    """Custody on the same database, with the real clock, as the commands have it."""
    with database.custody(worker="test") as opened:
        yield opened


def documented(document: Any) -> None:
    """Every field of a JSON document stands in docs/cli.md."""
    if isinstance(document, list):
        for item in document:
            documented(item)
    elif isinstance(document, dict):
        unknown = [name for name in document if not re.search(rf"`{re.escape(name)}`", DOCUMENT)]
        assert not unknown, f"docs/cli.md does not explain {unknown}"
        for name, value in document.items():
            if name not in ("payload", "headers"):
                documented(value)


@pytest.fixture
def explained() -> Callable[[Any], None]:
    return documented
