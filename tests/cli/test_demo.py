"""`custody demo` as a stranger runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.req("K9")
def test_the_demo_runs_from_nothing_and_says_what_it_checked() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "custody", "demo", "--json"], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["good"]
    assert len(verdict["checks"]) == 6
    assert "The story of" in done.stderr
