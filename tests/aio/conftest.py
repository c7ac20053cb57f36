"""Custody on an event loop. A test is a coroutine, run by `on_loop`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

import custody
import custody.aio

LIMIT = 60.0
"""Seconds for one test: a loop that stands still fails it."""


def on_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on an event loop of its own. A task that outlives it fails it."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def bounded() -> None:
            await asyncio.wait_for(test(*args, **fixtures), LIMIT)
            left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            assert left == []

        asyncio.run(bounded())

    return run


async def until(condition: Callable[[], object], what: str, timeout: float = 20.0) -> None:
    """Waits for a condition on the loop."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.005)
    assert condition(), what


@pytest.fixture
def url(c: custody.Custody, database_url: str) -> str:
    """A database with a topic `orders` and a group `stock`."""
    c.create_topic("orders", partitions=2)
    c.create_group("orders", "stock", custody.Policy(max_attempts=2))
    return database_url
