"""Fixtures for pytest: `pytest_plugins = ["custody.testing.fixtures"]` in the conftest.py at the root of your tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from custody.testing.clock import Clock
from custody.testing.server import TestCustody, TestServer, server


@pytest.fixture(scope="session")
def custody_server() -> Iterator[TestServer]:
    """One server for each test process: that of CUSTODY_TEST_DATABASE, or an embedded one."""
    with server(os.environ.get("CUSTODY_TEST_DATABASE")) as running:
        yield running


@pytest.fixture
def custody(custody_server: TestServer) -> Iterator[TestCustody]:
    """Custody on a fresh database, with a movable clock: `custody.clock.move("5s")`."""
    with custody_server.custody(clock=Clock()) as opened:
        yield opened
