"""Wake-ups on an event loop: tasks do what the threads of `notify.py` do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import psycopg

from custody.bridge import awaited
from custody.store.async_connecting import BoundedAsyncConnection
from custody.store.notify import CHANNEL, INTERVAL, RECONNECT, Hints

logger = logging.getLogger(__name__)

ENDING = 5.0
"""Seconds for the hints that are pending at the end."""


class AsyncHints(Hints):
    """Sends hints. Starts its task and connection with the first one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._topics: set[str] = set()
        self._more = asyncio.Event()
        self._ending = False
        self._task: asyncio.Task[None] | None = None

    def send(self, topic: str) -> None:
        self._topics.add(topic)
        self._more.set()
        if self._task is None and not self._ending:
            self._task = asyncio.get_running_loop().create_task(self._work(), name="custody-hints")

    def close(self) -> None:
        self._ending = True
        self._more.set()
        if self._task is not None:
            awaited(_ended(self._task))

    async def _work(self) -> None:
        while True:
            try:
                connection = await BoundedAsyncConnection.connect(self._url, application_name="custody hints")
                async with connection:
                    await self._send_each(connection)
                    return
            except psycopg.Error as error:
                logger.debug("wake-ups cannot be sent, consumers will poll: %s", error)
                if self._ending:
                    return
                await asyncio.sleep(RECONNECT)

    async def _send_each(self, connection: BoundedAsyncConnection) -> None:
        while self._topics or not self._ending:
            await self._more.wait()
            self._more.clear()
            topics, self._topics = self._topics, set()
            for topic in topics:
                await connection.execute("SELECT pg_notify(%s, %s)", [CHANNEL, topic])
            await asyncio.sleep(0 if self._ending else INTERVAL)


async def _ended(task: asyncio.Task[None]) -> None:
    """Waits for a task that is about to end."""
    done, _ = await asyncio.wait([task], timeout=ENDING)
    if not done:
        await _cancelled(task)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancels a task, and waits for its end."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


class AsyncListening:
    """One listener for all who wait on a client: it takes a connection only while somebody does.

    Behind a pooler there is no session that could listen, so consumers poll.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiting: dict[object, tuple[str, Callable[[], None]]] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls `wake` for each hint of the topic, until the returned function is called."""
        place = object()
        self._waiting[place] = topic, wake
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._listen(), name="custody-listener")

        def remove() -> None:
            self._waiting.pop(place, None)
            if not self._waiting and self._task is not None:
                self._task.cancel()
                self._task = None

        return remove

    def close(self) -> None:
        """Ends all calls of `wake`."""
        self._waiting.clear()
        task, self._task = self._task, None
        if task is not None:
            awaited(_cancelled(task))

    async def _listen(self) -> None:
        while True:
            try:
                connection = await BoundedAsyncConnection.connect(self._url, application_name="custody listener")
                async with connection:
                    if connection.pooled:
                        logger.info("there is a connection pooler: polling instead of listening (see listen_url)")
                        return
                    await connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(CHANNEL)))
                    self._wake(None)  # something may have come before it listened
                    await self._hear(connection)
            except psycopg.Error as error:
                logger.debug("wake-ups cannot be received, polling instead: %s", error)
                await asyncio.sleep(RECONNECT)

    async def _hear(self, connection: BoundedAsyncConnection) -> None:
        """Reads hints. Nothing is done while there are none."""
        loop, socket = asyncio.get_running_loop(), connection.fileno()
        while True:
            async for hint in connection.notifies(timeout=0):
                self._wake(hint.payload)
            arrived = asyncio.Event()
            loop.add_reader(socket, arrived.set)
            try:
                await arrived.wait()
            finally:
                loop.remove_reader(socket)

    def _wake(self, topic: str | None) -> None:
        for named, wake in list(self._waiting.values()):
            if topic in (None, named):
                wake()
