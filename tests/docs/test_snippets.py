"""Every Python and SQL snippet of the documents runs, each document from top to bottom in a home of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

import custody
from custody.store import embedded

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md")])
FENCE = re.compile(r"^```(python|sql)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def snippets(document: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(document.read_text(encoding="utf-8")) if kind == language]


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if FENCE.search(d.read_text("utf-8"))], ids=lambda path: path.name
)
def test_the_snippets_of_a_document_run(document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUSTODY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUSTODY_DATABASE", raising=False)
    with embedded.acquire(tmp_path / "home", settings={"fsync": "off"}) as server:
        script = tmp_path / "snippets.py"
        script.write_text("\n".join(snippets(document, "python")) or "pass", encoding="utf-8")
        run = subprocess.run(
            [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert run.returncode == 0, run.stderr
        for comment in re.findall(r"^\s*print\(.*\)  # (.*)$", script.read_text(encoding="utf-8"), re.MULTILINE):
            assert comment in run.stdout, f"the document says it prints {comment!r}, but it printed:\n{run.stdout}"
        custody.connect().close()
        with psycopg.connect(server.url, autocommit=True) as connection:
            for query in snippets(document, "sql"):
                connection.execute(query)  # type: ignore[arg-type]  # a snippet of our own
