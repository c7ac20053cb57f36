"""Turns of claims in a server: half of its threads, and one of them for places that are not slow."""

from __future__ import annotations

import asyncio

import pytest

from custody.http import threads
from custody.http.threads import ClaimLimiter


class Held:
    """Claims that last until they are let go."""

    def __init__(self, claiming: ClaimLimiter) -> None:
        self.claiming, self.begun = claiming, list[str]()
        self.go = asyncio.Event()

    async def claim(self, place: str) -> None:
        async with self.claiming.turn(place):
            self.begun.append(place)
            await self.go.wait()


async def settle() -> None:
    """Everybody who can go on has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def run(held: Held, *places: str) -> list[str]:
    """Those of the claims that begin while none ends; afterwards all of them end."""
    tasks = [asyncio.create_task(held.claim(place)) for place in places]
    await settle()
    begun = list(held.begun)
    held.go.set()
    await asyncio.gather(*tasks)
    assert sorted(held.begun) == sorted(places)
    return begun


def test_no_more_than_so_many_claim_at_once() -> None:
    async def scenario() -> None:
        assert await run(Held(ClaimLimiter(4)), *"abcdef") == list("abcd")
        assert await run(Held(ClaimLimiter(1)), *"ab") == ["a"]

    asyncio.run(scenario())


def test_places_whose_last_claim_was_slow_leave_one_turn_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        claiming = ClaimLimiter(3)
        monkeypatch.setattr(threads, "SLOW", -1.0)
        await run(Held(claiming), *"abcd")
        monkeypatch.setattr(threads, "SLOW", 60.0)
        assert await run(Held(claiming), *"abcdxy") == ["a", "b", "x"]
        assert await run(Held(claiming), *"abcd") == list("abc"), "their last claims were not slow"

    asyncio.run(scenario())


def test_only_so_many_slow_places_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        claiming = ClaimLimiter(3)
        monkeypatch.setattr(threads, "SLOW", -1.0)
        monkeypatch.setattr(threads, "REMEMBERED", 2)
        await run(Held(claiming), *"abc")
        assert list(claiming._known) == ["b", "c"], "the one that was seen longest ago is forgotten"

    asyncio.run(scenario())
