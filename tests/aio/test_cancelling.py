"""A task that is cancelled: its statement ends, its connection is free again, and no lease stays behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import psycopg
import pytest
from tests.aio.conftest import on_loop, until

import custody
import custody.aio
from custody.errors import DatabaseUnavailable
from custody.store.async_connecting import BoundedAsyncConnection

pytestmark = [pytest.mark.core, pytest.mark.req("X5", "X12")]
WHO = "FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
LARGE = ["x" * 1000] * 2000
"""Messages that are written by COPY in a transaction."""
WAITS, ENDED = f"SELECT count(*) {WHO}", f"SELECT pg_terminate_backend(pid) {WHO}"


class Lock:
    """A lock on a table of Custody."""

    def __init__(self, holder: psycopg.AsyncConnection[Any], watcher: psycopg.AsyncConnection[Any]) -> None:
        self._holder, self._watcher = holder, watcher

    async def release(self) -> None:
        await self._holder.rollback()

    async def waited_for(self, count: int = 1) -> None:
        """Waits until so many statements wait for it."""
        async with asyncio.timeout(20):
            while await (await self._watcher.execute(WAITS)).fetchone() != (count,):
                await asyncio.sleep(0.005)

    async def end_who_waits(self) -> None:
        await self._watcher.execute(ENDED)


@asynccontextmanager
async def locked(url: str, table: str) -> AsyncIterator[Lock]:
    """Nobody can use the table meanwhile."""
    async with (
        await psycopg.AsyncConnection.connect(url) as holder,
        await psycopg.AsyncConnection.connect(url, autocommit=True) as watcher,
    ):
        await holder.execute(psycopg.sql.SQL("LOCK TABLE {}").format(psycopg.sql.Identifier("custody", table)))
        yield Lock(holder, watcher)


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def started(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work)


@on_loop
async def test_a_cancelled_publish_leaves_no_statement_and_a_free_connection(url: str) -> None:
    async with custody.aio.connect(url, pool_size=1) as c:
        async with locked(url, "log") as lock:
            task = started(c.publish("orders", 1, partition=0))
            await lock.waited_for()
            began = time.monotonic()
            await cancelled(task)
            assert time.monotonic() - began < 4, "it waited for more than the answer to its cancellation"
            await lock.waited_for(0)
        assert (await c.publish("orders", 2, partition=0)).offset == 0
        assert c._of._db.connections()[:2] == (0, 1)


@on_loop
async def test_a_claim_that_was_cancelled_too_late_is_given_back(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object, **__: object) -> None:
        """The request to cancel arrives when the statement has ended."""

    async with custody.aio.connect(url, pool_size=1) as c:
        await c.publish("orders", 1, partition=0)
        for claim in (c.claim, (await c.claim("orders", "stock", partition=1)).next):
            async with locked(url, "leases") as lock:
                arguments = {"topic": "orders", "group": "stock", "partition": 0} if claim == c.claim else {}
                task = started(claim(**arguments))
                await lock.waited_for()
                with monkeypatch.context() as patched:
                    patched.setattr(BoundedAsyncConnection, "cancel_safe", lost)
                    task.cancel()
                    await asyncio.sleep(0)
                    await lock.release()
                    with pytest.raises(asyncio.CancelledError):
                        await task
            assert (await c.stats("orders", "stock")).in_flight == 0
        (message,) = await c.claim("orders", "stock", partition=0)
        assert message.attempt == 1, "it was released, and has not failed"
        kinds = [entry.kind for entry in await c.trace("orders", 0, 0)]
        assert "release" in " ".join(kinds)


@on_loop
async def test_a_cancelled_claim_has_taken_nothing(url: str) -> None:
    async with custody.aio.connect(url, pool_size=1) as c:
        await c.publish("orders", 1, partition=0)
        async with locked(url, "leases") as lock:
            task = started(c.claim("orders", "stock", partition=0))
            await lock.waited_for()
            await cancelled(task)
        assert (await c.stats("orders", "stock")).in_flight == 0
        assert await c.claim("orders", "stock", partition=0)


@on_loop
async def test_a_timeout_of_asyncio_ends_a_call(url: str) -> None:
    async with custody.aio.connect(url, pool_size=1) as c:
        async with locked(url, "log"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await c.publish_many("orders", LARGE)
        assert (await c.stats("orders", "stock")).lag == 0


@on_loop
async def test_who_waits_for_a_connection_can_be_cancelled(url: str) -> None:
    async with custody.aio.connect(url, pool_size=1) as c:
        async with locked(url, "log") as lock:
            first = started(c.publish("orders", 1, partition=0))
            await lock.waited_for()
            second = started(c.stats("orders", "stock"))
            await until(lambda: c._of._db.connections()[3] == 1, "the second waits for the connection")
            await cancelled(second)
            await lock.release()
            await first
        assert (await c.stats("orders", "stock")).lag == 1


@on_loop
async def test_a_producer_repeats_a_publish_that_was_cancelled(url: str) -> None:
    async with custody.aio.connect(url) as c:
        producer = await c.init_producer("p")
        async with locked(url, "log") as lock:
            task = started(producer.publish("orders", 1, partition=0))
            await lock.waited_for()
            await cancelled(task)
        (receipt,) = await producer.repeat()
        assert (receipt.offset, receipt.duplicate, producer.next_sequence) == (0, False, 1)
        assert [message.payload for message in await c.read("orders", 0)] == [1]


@on_loop
async def test_tasks_share_a_producer(url: str) -> None:
    async with custody.aio.connect(url) as c:
        producer = await c.init_producer("p")
        receipts = await asyncio.gather(*(producer.publish("orders", n, partition=0) for n in range(30)))
        assert [one.offset for one in receipts] == list(range(30))


@on_loop
async def test_a_transaction_whose_task_is_cancelled_is_aborted(url: str) -> None:
    async with custody.aio.connect(url) as c:
        producer = await c.init_producer("p")
        inside = asyncio.Event()

        async def never_ends() -> None:
            async with producer.transaction() as transaction:
                await transaction.publish("orders", 1)
                inside.set()
                await asyncio.Event().wait()

        task = started(never_ends())
        await inside.wait()
        await cancelled(task)
        assert await c.transactions.open() == []
        transaction = await producer.transaction()
        await transaction.publish("orders", 2)
        assert len(await transaction.commit()) == 1


@on_loop
async def test_opening_can_be_cancelled(url: str) -> None:
    async with locked(url, "migrations") as lock:

        async def opened() -> None:
            async with custody.aio.connect(url):
                pass

        task = started(opened())
        await lock.waited_for()
        await cancelled(task)
        await lock.waited_for(0)


@on_loop
async def test_the_loop_goes_on_while_the_database_is_slow(url: str) -> None:
    """If a call blocked the loop, nobody would release the lock before the statement is cancelled."""
    async with custody.aio.connect(url, statement_timeout="10s") as c:
        await c.publish_many("orders", list(range(20)))
        async with locked(url, "log") as lock:
            calls = [
                c.publish("orders", 1, partition=0),
                c.publish_many("orders", LARGE),
                c.claim("orders", "stock"),
                c.stats("orders", "stock"),
                c.read("orders", 0),
                c.redrive("orders", "stock"),
            ]
            tasks = list(map(started, calls))
            await lock.waited_for(5)  # a redrive of nothing reads no messages
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert sum(not task.done() for task in tasks) == 5
            await lock.release()
            await asyncio.gather(*tasks)


@on_loop
async def test_an_end_of_the_connection_is_an_error_and_the_next_call_gets_another(url: str) -> None:
    async with custody.aio.connect(url, pool_size=1) as c:
        async with locked(url, "log") as lock:
            task = started(c.publish("orders", 1, partition=0))
            await lock.waited_for()
            await lock.end_who_waits()
            with pytest.raises(DatabaseUnavailable):
                await task
        assert (await c.publish("orders", 2, partition=0)).offset == 0


@on_loop
async def test_a_transaction_that_was_cancelled_too_late_is_rolled_back(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: object, **__: object) -> None:
        """The request to cancel arrives when the statement has ended."""

    async with custody.aio.connect(url, pool_size=1) as c:
        monkeypatch.setattr(BoundedAsyncConnection, "cancel_safe", lost)
        async with locked(url, "heads") as lock:
            task = started(c.publish_many("orders", LARGE))  # COPY follows the statement that waits
            await lock.waited_for()
            task.cancel()
            await asyncio.sleep(0)
            await lock.release()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await c.topic("orders")).message_count == 0
