"""The walkthrough with curl, against a server process."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.http.conftest import Process

pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None or shutil.which("bash") is None, reason="there is no curl or no bash here"
)

SCRIPT = Path(__file__).parents[2] / "examples" / "walkthrough.sh"


def walk(url: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUSTODY_URL": url}
    return subprocess.run(["bash", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.req("G1", "G2", "G3", "G4", "G5", "G6", "G7", "G9", "G10", "G11", "G12", "G13")
def test_the_walkthrough_can_be_walked_again_and_again(process: Callable[..., Process]) -> None:
    server = process()
    for _ in range(2):
        done = walk(server.http.url)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr
        assert done.stdout.splitlines()[-1] == "Everything was as it should be."


def test_without_a_server_the_walkthrough_says_what_to_do() -> None:
    done = walk("http://127.0.0.1:1")
    assert done.returncode == 1
    assert "custody serve" in done.stderr


def test_an_answer_that_is_not_as_expected_ends_the_walkthrough(process: Callable[..., Process]) -> None:
    server = process()
    done = walk(f"{server.http.url}/nowhere")
    assert done.returncode == 1
    assert "FAILED: POST /topics: expected 201" in done.stderr
