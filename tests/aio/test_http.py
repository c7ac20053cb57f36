"""A client on an event loop: what it does when a server does not answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.aio.conftest import on_loop
from tests.http.conftest import served

import custody
import custody.aio
from custody.errors import DatabaseUnavailable, InsecureKey

pytestmark = pytest.mark.req("X5", "X12")


@contextmanager
def mute() -> Iterator[str]:
    """A server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@on_loop
async def test_a_server_that_is_not_there_is_not_opened() -> None:
    with mute() as url:
        pass
    with pytest.raises(DatabaseUnavailable, match="cannot be reached"):
        await custody.aio.connect(url)


@on_loop
async def test_opening_at_a_mute_server_can_be_cancelled() -> None:
    with mute() as url, pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await custody.aio.connect(url)


@on_loop
async def test_a_key_is_not_sent_to_another_machine_in_the_clear() -> None:
    with pytest.raises(InsecureKey):
        await custody.aio.connect("http://198.51.100.1:8080", api_key="cus_x")


@on_loop
async def test_many_tasks_share_a_client(c: custody.Custody, url: str) -> None:
    with served(c) as server:
        async with custody.aio.connect(server.url) as client:
            receipts = await asyncio.gather(*(client.publish("orders", n, partition=0) for n in range(50)))
    assert sorted(one.offset for one in receipts) == list(range(50))


@on_loop
async def test_a_call_of_a_server_that_has_gone_ends(c: custody.Custody, url: str) -> None:
    with served(c) as server:
        client = await custody.aio.connect(server.url, retry_for="300ms")
        await client.publish("orders", 1)
    with pytest.raises(DatabaseUnavailable):
        await client.publish("orders", 2)
    with pytest.raises(DatabaseUnavailable):
        await client.ping()
    await client.close()


@on_loop
async def test_a_cancelled_publish_is_fenced_before_the_next(c: custody.Custody, url: str) -> None:
    """Its request may still arrive: then it must not come after what was published since."""
    with served(c) as server:
        async with custody.aio.connect(server.url) as client:
            await client.publish("orders", 1, partition=0)
            task = asyncio.create_task(client.publish("orders", "cancelled", partition=0))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await client.publish("orders", 2, partition=0)
            payloads = [message.payload for message in await client.read("orders", 0)]
    assert payloads in ([1, 2], [1, "cancelled", 2])
