"""The fixtures, as a project of a user has them: in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest
from custody import Constant, Policy
from custody.testing import drain


@pytest.mark.parametrize("run", [1, 2])
def test_orders(custody, run):
    custody.create_topic("orders")
    custody.create_group("orders", "stock", Policy(max_attempts=2, backoff=Constant("5s")))
    custody.publish("orders", {"sku": "SKU-1"})
    lease = custody.claim("orders", "stock")
    lease.nack(error="timeout")
    assert not custody.claim("orders", "stock")
    custody.clock.move("5s")
    assert drain(custody, "orders", "stock", lambda message: None).done == 1


def test_the_server(custody_server):
    with custody_server.database() as url:
        assert url.startswith("postgresql://")
"""


def test_a_project_uses_the_fixtures(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["custody.testing.fixtures"]\n')
    (tmp_path / "test_orders.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if name != "CUSTODY_TEST_DATABASE"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:asyncio", tmp_path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "3 passed" in run.stdout
