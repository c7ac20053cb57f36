"""Wake-ups and the worker, on the event loop of the application."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tests.aio.conftest import on_loop, until
from tests.http.conftest import served

import custody
import custody.aio
from custody.errors import TopicNotFound
from custody.store.notify import CHANNEL

pytestmark = [pytest.mark.core, pytest.mark.req("X12")]


@pytest.fixture(params=["direct", "http"])
def at(request: pytest.FixtureRequest, url: str, database_url: str) -> Any:
    """The URL of the database, or of a server of it."""
    with custody.connect(database_url) as c:  # with the real clock: workers wait
        if request.param == "direct":
            yield url
            return
        with served(c) as server:
            yield server.url


@on_loop
async def test_who_listens_is_woken_by_a_publish(at: str) -> None:
    async with custody.aio.connect(at) as c, custody.aio.connect(at) as other:
        woken, elsewhere = asyncio.Event(), asyncio.Event()
        stop = await c.listen("orders", woken.set)
        await c.create_topic("others")
        await c.listen("others", elsewhere.set)  # until the client is closed
        async with asyncio.timeout(20):
            await woken.wait()  # something may have come before it listened
            elsewhere.clear()
            woken.clear()
            await other.publish("orders", 1)
            await woken.wait()
            woken.clear()
            stop()
            elsewhere.clear()
            await other.publish("orders", 2)
            await other.publish("others", 2)
            await elsewhere.wait()
        assert not woken.is_set()


@on_loop
async def test_a_listener_comes_back_after_its_connection_was_ended(url: str, db: Any) -> None:
    async with custody.aio.connect(url) as c:
        woken = asyncio.Event()
        await c.listen("orders", woken.set)
        listening = "SELECT pid FROM pg_stat_activity WHERE application_name = 'custody listener' AND state = 'idle'"
        listening += " AND datname = current_database()"
        await until(lambda: db.execute(listening).fetchall() and woken.is_set(), "it listens")
        woken.clear()
        db.execute(f"SELECT pg_terminate_backend(pid) FROM ({listening}) l")
        await asyncio.wait_for(woken.wait(), 20)  # after a time in which it could not listen
        woken.clear()
        db.execute("SELECT pg_notify(%s, 'orders')", [CHANNEL])
        await asyncio.wait_for(woken.wait(), 20)


@on_loop
async def test_a_worker_awaits_handlers_on_the_loop_and_stops_when_it_is_cancelled(at: str) -> None:
    async with custody.aio.connect(at, worker="w") as c:
        here, began, go_on = threading.get_ident(), asyncio.Event(), asyncio.Event()
        handled: list[Any] = []

        async def handle(message: custody.Message) -> None:
            assert threading.get_ident() == here
            if message.payload == "fails":
                raise ValueError("no")
            if message.payload == "last":
                began.set()
                await go_on.wait()
            await c.publish("done", message.payload)
            handled.append(message.payload)

        await c.create_topic("done")
        await c.publish_many("orders", [1, 2, "fails"])
        work = asyncio.create_task(c.work("orders", "stock", handle, concurrency=4, poll="50ms"))
        await until(lambda: len(handled) == 2, "both were handled")
        await c.publish("orders", "last")
        await asyncio.wait_for(began.wait(), 20)
        work.cancel()
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not work.done(), "it waits for the handler that runs"
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert sorted(map(str, handled)) == ["1", "2", "last"]
        stats = await c.stats("orders", "stock")
        assert (stats.in_flight, stats.lag) == (0, 0), "the last one was settled"


@on_loop
async def test_a_worker_ends_with_its_error(at: str) -> None:
    async with custody.aio.connect(at) as c:

        async def handle(_: custody.Message) -> None: ...

        with pytest.raises(TopicNotFound):
            await c.work("nothing", "stock", handle)
        work = asyncio.create_task(c.work("orders", "stock", handle, poll="20ms"))
        await c.publish("orders", 1)
        async with asyncio.timeout(20):
            while (await c.stats("orders", "stock")).depth:
                await asyncio.sleep(0.01)
        await c.delete_topic("orders")
        with pytest.raises(custody.CustodyError):
            await asyncio.wait_for(work, 20)


@on_loop
async def test_a_handler_that_takes_too_long_is_cancelled(url: str, database_url: str) -> None:
    async with custody.aio.connect(url) as c:
        await c.create_group("orders", "quick", custody.Policy(handler_timeout="100ms", max_attempts=1))
        ended = asyncio.Event()

        async def handle(_: custody.Message) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        await c.publish("orders", 1)
        work = asyncio.create_task(c.work("orders", "quick", handle))
        await asyncio.wait_for(ended.wait(), 20)
        async with asyncio.timeout(20):
            while not (letters := await c.dead("orders", "quick")):
                await asyncio.sleep(0.01)
        assert "took longer than" in letters[0].last_error
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
