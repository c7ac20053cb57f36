"""SIGTERM and Ctrl-C as a request to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Makes SIGTERM and Ctrl-C call `stop` while the block runs. A second signal has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(number: int, _: FrameType | None) -> None:
        signal.signal(number, before[signal.Signals(number)])
        stop()

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
