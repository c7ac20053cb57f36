"""Waiting for a condition: what a test does in place of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], message: str | Callable[[], str], timeout: float = 20.0) -> T:
    """The first true value of the condition. Fails with the message after the time-out."""
    until = time.monotonic() + timeout
    pause = 0.001
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            raise AssertionError(f"after {timeout} s: {message if isinstance(message, str) else message()}")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
