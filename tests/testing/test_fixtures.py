"""The fixtures, as a project of a user has them: in a pytest of its own, found by the entry point."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import custody
import pytest
from custody import Constant, Policy


@pytest.mark.parametrize("run", [1, 2])
def test_orders(custody_db, custody_clock, drain, run):
    custody_db.create_topic("orders")
    custody_db.create_group("orders", "stock", Policy(max_attempts=2, backoff=Constant("5s")))
    custody_db.publish("orders", {"sku": "SKU-1"})
    lease = custody_db.claim("orders", "stock")
    lease.nack(error=custody.Retry("timeout"))
    assert not custody_db.claim("orders", "stock")
    custody_clock.move("5s")
    assert drain("orders", "stock", lambda message: None).done == 1


def test_a_time_of_its_own(custody_db, custody_clock, freeze):
    freeze("2026-11-19T09:00Z")
    custody_db.create_topic("orders")
    assert custody_db.topic("orders").created_at == custody_db.clock() == custody_clock.time


def test_the_server(custody_server):
    with custody_server.database() as url:
        assert url.startswith("postgresql://")
"""
WITHOUT = """
import sys

HEAVY = {"custody", "psycopg", "psycopg_pool", "msgspec", "rich", "typer", "pyarrow", "pandas", "pyspark"}


def test_nothing_heavy_is_imported():
    assert "pytest_custody" in sys.modules
    assert HEAVY & {name.partition(".")[0] for name in sys.modules} == set()
"""


def pytest_of_a_user(directory: Path, tests: str, *arguments: str) -> str:
    (directory / "test_of_a_user.py").write_text(tests, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "CUSTODY_TEST_DATABASE"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *arguments, directory]
    plugins = ["-p", "no:asyncio", "-p", "no:hypothesispytest", "-p", "no:schemathesis"]  # those of this environment
    run = subprocess.run(
        [*command, *plugins], capture_output=True, text=True, cwd=directory, env=environment, timeout=120, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.req("X12")
def test_a_project_uses_the_fixtures_without_naming_them(tmp_path: Path) -> None:
    assert "4 passed" in pytest_of_a_user(tmp_path, TESTS)


def test_a_project_that_uses_no_fixture_imports_nothing_of_custody(tmp_path: Path) -> None:
    assert "1 passed" in pytest_of_a_user(tmp_path, WITHOUT)


def test_a_project_sees_the_fixtures_and_what_they_are_for(tmp_path: Path) -> None:
    shown = pytest_of_a_user(tmp_path, WITHOUT, "--fixtures", "-v")
    for name in ("custody_server", "custody_clock", "custody_db", "drain", "freeze"):
        assert f"\n{name} " in shown
