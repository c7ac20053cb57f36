"""Coalescing: at once if nobody is before it, together if somebody is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from custody.errors import QueueFull
from custody.http.coalesce import Coalescer


class Slow:
    """Performs when it is let, and notes what it was given together."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.let = threading.Semaphore(0)

    def __call__(self, items: Sequence[str]) -> list[str | QueueFull]:
        self.batches.append(list(items))
        assert self.let.acquire(timeout=10)
        return [QueueFull(item) if item.startswith("bad") else f"{item} done" for item in items]


def run(scenario: object, slow: Slow, **settings: object) -> None:
    async def main() -> None:
        with ThreadPoolExecutor(4) as executor:
            made: Coalescer[str, str] = Coalescer(slow, executor, keys=lambda item: {item[-1]}, **settings)
            await asyncio.wait_for(scenario(made), 20)

    asyncio.run(main())


async def until(condition: object) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@pytest.mark.req("C5")
def test_a_lone_request_goes_at_once_and_what_comes_meanwhile_goes_together() -> None:
    slow = Slow()

    async def scenario(c: Coalescer[str, str]) -> None:
        first = asyncio.ensure_future(c.submit("first a"))
        await until(lambda: slow.batches == [["first a"]])
        rest = [asyncio.ensure_future(c.submit(f"{n} a")) for n in range(5)]
        await asyncio.sleep(0)
        assert len(slow.batches) == 1  # of a key one batch is under way at a time
        slow.let.release(2)
        assert await first == "first a done"
        assert await asyncio.gather(*rest) == [f"{n} a done" for n in range(5)]
        assert slow.batches[1:] == [[f"{n} a" for n in range(5)]]

    run(scenario, slow)


@pytest.mark.req("C5")
def test_an_error_is_its_items_own() -> None:
    slow = Slow()

    async def scenario(c: Coalescer[str, str]) -> None:
        asyncio.ensure_future(c.submit("first a")).add_done_callback(lambda done: done.result())
        await until(lambda: slow.batches)
        rest = [asyncio.ensure_future(c.submit(item)) for item in ("good a", "bad a", "fine a")]
        slow.let.release(2)
        good, bad, fine = await asyncio.gather(*rest, return_exceptions=True)
        assert (good, fine) == ("good a done", "fine a done")
        assert isinstance(bad, QueueFull)

    run(scenario, slow)


def test_other_keys_do_not_wait_and_slots_are_bounded() -> None:
    slow = Slow()

    async def scenario(c: Coalescer[str, str]) -> None:
        waiting = [asyncio.ensure_future(c.submit(item)) for item in ("1 a", "1 b", "1 c", "2 a")]
        await until(lambda: len(slow.batches) == 2)
        assert slow.batches == [["1 a"], ["1 b"]]  # two slots
        slow.let.release(4)
        await asyncio.gather(*waiting)
        assert sorted(map(sorted, slow.batches[2:])) in ([["1 c", "2 a"]], [["1 c"], ["2 a"]])

    run(scenario, slow, slots=2)


def test_a_failure_of_the_whole_reaches_everybody() -> None:
    async def main() -> None:
        def perform(items: Sequence[str]) -> list[str]:
            raise RuntimeError("broken")

        with ThreadPoolExecutor(1) as executor:
            made: Coalescer[str, str] = Coalescer(perform, executor, keys=lambda _: ())
            answers = await asyncio.gather(made.submit("1"), made.submit("2"), return_exceptions=True)
        assert [str(answer) for answer in answers] == ["broken", "broken"]

    asyncio.run(main())


def test_a_batch_is_no_larger_than_it_may_be_and_without_coalescing_each_goes_alone() -> None:
    for settings, most in (({"most": 3}, 3), ({"enabled": False}, 1)):
        slow = Slow()
        slow.let.release(100)

        async def scenario(c: Coalescer[str, str]) -> None:
            await asyncio.gather(*(c.submit(f"{n} a") for n in range(10)))

        run(scenario, slow, **settings)
        assert max(map(len, slow.batches)) <= most
        assert sorted(item for batch in slow.batches for item in batch) == [f"{n} a" for n in range(10)]
