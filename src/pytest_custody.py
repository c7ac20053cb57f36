"""Fixtures for pytest, which finds this module by its entry point. It imports nothing of Custody until one is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from custody.testing import Clock, Drained, TestCustody, TestServer


@pytest.fixture(scope="session")
def custody_server() -> Iterator[TestServer]:
    """One server for each test process: that of CUSTODY_TEST_DATABASE, or an embedded one."""
    from custody.testing import server

    with server(os.environ.get("CUSTODY_TEST_DATABASE")) as running:
        yield running


@pytest.fixture
def custody_clock() -> Clock:
    """The clock of `custody_db`: it stands still until `custody_clock.move("5s")`."""
    from custody.testing import Clock

    return Clock()


@pytest.fixture
def custody_db(custody_server: TestServer, custody_clock: Clock) -> Iterator[TestCustody]:
    """Custody on a fresh database, with `custody_clock`."""
    with custody_server.custody(clock=custody_clock) as opened:
        yield opened


@pytest.fixture
def drain(custody_db: TestCustody) -> Callable[..., Drained]:
    """`drain("orders", "stock", handler)` handles all messages of a group of `custody_db`, and moves its clock."""
    from custody.testing import drain

    return partial(drain, custody_db)


@pytest.fixture
def freeze(custody_clock: Clock) -> Callable[[datetime | str], datetime]:
    """`freeze("2030-01-31T12:00Z")` sets `custody_clock` to a time."""
    return custody_clock.set
