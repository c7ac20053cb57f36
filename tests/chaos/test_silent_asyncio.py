"""asyncio and a database that accepts and never answers: every call ends, and the event loop goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from typing import Any

import pytest
from tests.aio.conftest import on_loop
from tests.chaos.proxy import Proxy

import custody
import custody.aio
from custody.errors import DatabaseUnavailable
from custody.store import async_connecting, connecting

pytestmark = pytest.mark.req("X5", "X12")

ENDS = 30.0
BEAT = 0.01


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits, shorter."""
    monkeypatch.setattr(connecting, "SILENCE", 0.5)
    monkeypatch.setattr(connecting, "GRACE", 0.5)
    monkeypatch.setattr(connecting, "CONNECT", 2)
    for module in (connecting, async_connecting):
        monkeypatch.setattr(module, "PROBE", 2)


@pytest.fixture
def proxy(c: custody.Custody, database_url: str) -> Iterator[Proxy]:
    c.create_topic("t")
    c.create_group("t", "g")
    with closing(Proxy(database_url)) as opened:
        yield opened


class Heart:
    """Beats on the loop, and knows how many beats there were."""

    async def __aenter__(self) -> Heart:
        self.beats, self._began = 0, time.monotonic()
        self._task = asyncio.get_running_loop().create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        assert time.monotonic() - self._began < ENDS, "it did not end in time"
        # a loop that a busy machine holds up still beats; one that a call blocks stands still for seconds
        wanted = (time.monotonic() - self._began) / BEAT / 4
        assert self.beats >= wanted, f"{self.beats} beats, where {wanted:.0f} were the least"

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            self.beats += 1


@on_loop
async def test_every_call_ends_and_the_pool_recovers(proxy: Proxy) -> None:
    async with custody.aio.connect(proxy.url, pool_size=4) as c:
        c._of._db._waiting.timeout = 1.0  # type: ignore[attr-defined]  # ten seconds, else
        await c.publish("t", "before")
        proxy.silence()
        calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: c.publish("t", 1),
            lambda: c.publish_many("t", list(range(3000))),
            lambda: c.publish_many("t", ["x" * 1000] * 2000),  # by COPY
            lambda: c.claim("t", "g"),
            lambda: c.stats("t", "g"),
            c.ping,
        ]
        for call in calls:
            async with Heart():
                with pytest.raises(DatabaseUnavailable):
                    await call()
        async with Heart():
            answers = await asyncio.gather(*(c.stats("t", "g") for _ in range(8)), return_exceptions=True)
        assert [type(one) for one in answers] == [DatabaseUnavailable] * 8
        proxy.mend()
        async with asyncio.timeout(ENDS):
            while True:
                try:
                    await c.ping()
                    break
                except DatabaseUnavailable:
                    await asyncio.sleep(0.05)
        assert (await c.publish("t", "after")).offset >= 1


@on_loop
async def test_a_cancelled_call_ends_soon_although_the_database_is_silent(proxy: Proxy) -> None:
    async with custody.aio.connect(proxy.url, pool_size=1) as c:
        proxy.silence()
        async with Heart():
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await c.claim("t", "g")
            assert time.monotonic() - began < 2 * async_connecting.PROBE + 2
        proxy.mend()
        assert (await c.publish("t", 1)).offset == 0


@on_loop
async def test_a_silent_database_is_not_opened(proxy: Proxy) -> None:
    proxy.silence()
    async with Heart():
        with pytest.raises(DatabaseUnavailable, match="timeout"):
            await custody.aio.connect(proxy.url)


@on_loop
async def test_a_statement_that_takes_long_is_waited_for(proxy: Proxy, database_url: str) -> None:
    """Longer than the time until the probe, which finds its backend at work."""
    import psycopg

    async with (
        custody.aio.connect(proxy.url) as c,
        await psycopg.AsyncConnection.connect(database_url) as holder,
        Heart(),
    ):
        await holder.execute("LOCK TABLE custody.log")
        publishing = asyncio.get_running_loop().create_task(c.publish("t", 1))
        done, _ = await asyncio.wait([publishing], timeout=4 * connecting.SILENCE)
        assert not done
        await holder.rollback()
        assert (await publishing).offset == 0
