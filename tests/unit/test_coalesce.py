"""Coalescing: at once if nobody is before it, together if somebody is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from custody.coalesced import BLOCKED
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
            made: Coalescer[str, str] = Coalescer(slow, executor, **{"keys": lambda item: {item[-1]}, **settings})
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


def test_a_batch_is_no_heavier_than_it_may_be_unless_it_is_one_item() -> None:
    slow = Slow()

    async def scenario(c: Coalescer[str, str]) -> None:
        first = asyncio.ensure_future(c.submit("first a", 0))
        weights = {"1 a": 9, "2 b": 9, "3 a": 1, "4 c": 7, "5 c": 40, "6 c": 1}
        rest = [asyncio.ensure_future(c.submit(item, weight << 20)) for item, weight in weights.items()]
        await asyncio.sleep(0)
        slow.let.release(10)
        await asyncio.gather(first, *rest)
        assert slow.batches == [["first a"], ["1 a", "3 a"], ["2 b", "4 c"], ["5 c"], ["6 c"]]

    run(scenario, slow, slots=1)


def test_one_of_two_keys_is_not_overtaken_for_ever() -> None:
    slow = Slow()
    slow.let.release(1000)

    async def scenario(c: Coalescer[str, str]) -> None:
        busy = True

        async def keep_busy(item: str) -> None:
            while busy:
                await c.submit(item)

        loops = [asyncio.ensure_future(keep_busy(f"{n} {key}")) for n in range(4) for key in "ab"]
        await until(lambda: len(slow.batches) > 3)
        assert await asyncio.wait_for(c.submit("both ab"), 5) == "both ab done"
        busy = False
        await asyncio.gather(*loops)

    run(scenario, slow, keys=lambda item: set(item.split()[1]))


def test_what_is_blocked_comes_again_by_itself_and_holds_up_nobody() -> None:
    batches: list[list[str]] = []
    free, begin = threading.Event(), threading.Event()

    def perform(items: Sequence[str]) -> list[object]:
        if items[0].startswith("first"):
            assert begin.wait(10)
            return list(items)
        batches.append(list(items))
        if items == ["held a"]:
            assert free.wait(10)
            return ["held done"]
        return [BLOCKED if item == "held a" else f"{item} done" for item in items]

    async def main() -> None:
        with ThreadPoolExecutor(4) as executor:
            c: Coalescer[str, str] = Coalescer(perform, executor, keys=lambda item: {item[-1]}, slots=2)
            first = asyncio.ensure_future(c.submit("first c")), asyncio.ensure_future(c.submit("first d"))
            await asyncio.sleep(0)  # all slots are taken: what comes now goes together
            both = [asyncio.ensure_future(c.submit(item)) for item in ("held a", "1 b")]
            await asyncio.sleep(0)
            begin.set()
            assert await asyncio.gather(*first) == ["first c", "first d"]
            assert await asyncio.wait_for(both[1], 5) == "1 b done"
            assert await asyncio.wait_for(c.submit("2 b"), 5) == "2 b done"
            assert not both[0].done()
            free.set()
            assert await asyncio.wait_for(both[0], 5) == "held done"
        assert batches == [["held a", "1 b"], ["held a"], ["2 b"]]

    asyncio.run(main())
