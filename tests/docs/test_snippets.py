"""Every Python, SQL and shell snippet of the documents runs, each document from top to bottom in a database of its own.

Those of Django are a project, which runs in tests/django. Where one calls a server, it has one; what the comments of
shell snippets show after a call has to be in its answers.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from tests.http.conftest import Process

import custody

ROOT = Path(__file__).parents[2]
LOCAL = "http://localhost:8080"
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
FENCE = re.compile(r"^```(python|sql|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(document: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(document.read_text(encoding="utf-8")) if kind == language]


def needs_spark(document: Path) -> bool:
    return any("custody.spark" in code for code in snippets(document, "python"))


WITH_SNIPPETS = [
    document
    for document in DOCUMENTS
    if FENCE.search(document.read_text(encoding="utf-8")) and document.name != "django.md"
]


@pytest.mark.parametrize("document", [d for d in WITH_SNIPPETS if not needs_spark(d)], ids=lambda path: path.name)
def test_the_snippets_of_a_document_run(
    document: Path, bare_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with Spark are run in tests/spark."""
    run_document(document, bare_url, tmp_path, monkeypatch, lambda script: run_python(script, bare_url, tmp_path))


@pytest.mark.chaos
@pytest.mark.parametrize("document", [d for d in WITH_SNIPPETS if not needs_spark(d)], ids=lambda path: path.name)
def test_the_python_of_a_document_runs_twice_from_nothing(document: Path, base: Path) -> None:
    """As a reader runs it: on the embedded database of a directory, which no other program keeps running."""
    script = "\n".join(snippets(document, "python"))
    if not script or LOCAL in script:
        pytest.skip("nothing of it runs without a server")
    (base / "snippets.py").write_text(script, encoding="utf-8")
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "snippets.py"],
            cwd=base,
            env={name: value for name, value in os.environ.items() if not name.startswith("CUSTODY_")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stderr


def run_document(
    document: Path, database_url: str, directory: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[[str], None]
) -> None:
    """The database comes from the environment: that one is made in an empty home is proved by the examples."""
    monkeypatch.setenv("CUSTODY_DATABASE", database_url)
    monkeypatch.delenv("CUSTODY_HOME", raising=False)
    if script := "\n".join(snippets(document, "python")):
        run(script)
    custody.connect().close()
    with psycopg.connect(database_url, autocommit=True) as connection:
        for query in snippets(document, "sql"):
            connection.execute(query)  # type: ignore[arg-type]  # a snippet of our own
    if script := "\n".join(snippets(document, "sh")):
        run_shell(script, database_url, directory)


def run_python(script: str, database_url: str, directory: Path) -> None:
    with served(script, database_url, directory) as code:
        (directory / "snippets.py").write_text(code, encoding="utf-8")
        run = subprocess.run(
            [sys.executable, "snippets.py"], cwd=directory, capture_output=True, text=True, timeout=300, check=False
        )
    assert run.returncode == 0, run.stderr
    check_output(script, run.stdout)


def check_output(script: str, output: str) -> None:
    for comment in re.findall(r"^\s*print\(.*\)  # (.*)$", script, re.MULTILINE):
        assert comment in output, f"the document says it prints {comment!r}, but it printed:\n{output}"


CURL = 'curl() { command curl --silent --show-error --fail-with-body "$@" | tee -a answers; echo >>answers; }\n'
"""A call that is refused ends the script, and every answer is written down, also where a snippet cuts it up."""


def run_shell(script: str, database_url: str, directory: Path) -> None:
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("there is no curl or no bash here")
    with served(script, database_url, directory) as code:
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", CURL + code],
            cwd=directory,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    if "curl" not in script:
        return
    answers = (directory / "answers").read_text(encoding="utf-8")
    shown = re.findall(r'^# ([{"\[].*)$', script, re.MULTILINE)
    assert shown, "a document shows what the calls answer"
    for part in shown:
        assert part in answers, f"the document shows {part!r}, but the answers were:\n{answers}"


@contextmanager
def served(script: str, database_url: str, directory: Path) -> Iterator[str]:
    """The script with the address of a server that runs meanwhile, if it calls one."""
    if LOCAL not in script:
        yield script
        return
    server = Process(database_url, cwd=directory)
    try:
        yield script.replace(LOCAL, server.http.url)
    finally:
        server.stop()
        assert server.popen.stdout is not None
        server.popen.stdout.close()
