"""The snippets of the documents that use Spark run in the session that the tests of a process share."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.docs.test_snippets import WITH_SNIPPETS, check_output, needs_spark, run_document


@pytest.mark.parametrize("document", [d for d in WITH_SNIPPETS if needs_spark(d)], ids=lambda path: path.name)
def test_the_snippets_of_a_document_run(
    document: Path, bare_url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spark  # in which they run
    monkeypatch.chdir(tmp_path)
    run_document(document, bare_url, tmp_path, monkeypatch, run_here)


def run_here(script: str) -> None:
    output = io.StringIO()
    with redirect_stdout(output):
        exec(compile(script, "snippets", "exec"), {"__name__": "__main__"})
    check_output(script, output.getvalue())
