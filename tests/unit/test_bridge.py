"""Blocking code on an event loop: where it waits, the loop goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

from custody import bridge

pytestmark = pytest.mark.req("X12")
name: ContextVar[str] = ContextVar("name", default="nobody")


def test_outside_of_a_loop_everything_blocks() -> None:
    assert not bridge.bridged()
    bridge.pause(0)
    happened = bridge.event()
    assert not happened.wait(0)
    bridge.start(happened.set, name="test")
    assert happened.wait(20)
    with bridge.lock():
        assert bridge.outside(threading.get_ident) == threading.get_ident()


@pytest.mark.parametrize(
    "wait",
    [
        lambda: bridge.pause(30),
        lambda: bridge.event().wait(),
        lambda: bridge.event().wait(30),
        lambda: bridge.awaited(asyncio.Event().wait()),
    ],
)
def test_a_wait_can_be_cancelled_and_cleans_up(wait: Callable[[], Any]) -> None:
    ended: list[str] = []

    def work() -> None:
        try:
            wait()
        finally:
            bridge.pause(0)  # cleaning up may wait, too
            ended.append("cleaned up")

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await bridge.run(work)

    began = time.monotonic()
    asyncio.run(main())
    assert ended == ["cleaned up"]
    assert time.monotonic() - began < 20


def test_two_of_them_take_turns_at_a_lock_and_meet_by_an_event() -> None:
    said: list[str] = []

    async def main() -> None:
        lock, happened = await bridge.run(lambda: (bridge.lock(), bridge.event()))

        def first() -> None:
            with lock:
                said.append("first has it")
                assert happened.wait(20)
                said.append("first leaves it")

        def second() -> None:
            happened.set()
            with lock:
                said.append("second has it")

        await asyncio.gather(bridge.run(first), bridge.run(second))

    asyncio.run(main())
    assert said == ["first has it", "first leaves it", "second has it"]


def test_what_runs_outside_has_a_thread_and_a_cancellation_comes_after_its_end() -> None:
    go_on, undone = threading.Event(), []

    def work() -> int:
        return bridge.outside(lambda: (go_on.wait(20), threading.get_ident())[1])

    async def main() -> None:
        task = asyncio.create_task(bridge.run(work, undo=undone.append))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert len(undone) == 1
    assert undone != [threading.get_ident()]


def test_errors_results_and_context_variables_pass() -> None:
    async def later(value: object) -> object:
        await asyncio.sleep(0)
        if isinstance(value, Exception):
            raise value
        return value, name.get()

    async def main() -> None:
        name.set("somebody")
        assert await bridge.run(lambda: (bridge.awaited(later(1)), name.get())) == ((1, "somebody"), "somebody")
        with pytest.raises(ValueError, match="no"):
            await bridge.run(lambda: bridge.awaited(later(ValueError("no"))))
        assert not bridge.bridged()

    asyncio.run(main())
