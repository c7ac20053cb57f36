"""The connections to PostgreSQL of an event loop, with the limits of `connecting.py`.

A task that is cancelled while it waits cancels its statement at the server, and gives the connection back when that has
answered. If it does not answer soon, the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Self

import psycopg
from psycopg import IsolationLevel, waiting
from psycopg.pq import TransactionStatus

from custody import bridge
from custody.store import packed
from custody.store.connecting import PROBE, Backend, Session, Waiting, own_settings

INTERVAL = 0.1
"""Seconds after which a wait looks whether it may go on."""


class BoundedAsyncConnection(Session, psycopg.AsyncConnection[Any]):
    """A connection without unlimited waits, for one event loop. In autocommit mode."""

    _aside: asyncio.Future[Any] | None = None
    """The probe, or the request to cancel a statement, that is under way."""

    @classmethod
    async def connect(cls, conninfo: str = "", **settings: Any) -> Self:
        """As `BoundedConnection.connect`."""
        url, limit = own_settings(conninfo, settings)
        made = await super().connect(url, **{"autocommit": True, **settings})
        try:
            made._url = url
            packed.register(made)
            asked = await made.execute(*made._question(limit), prepare=False)
            made._answered(await asked.fetchone())
            await made.set_isolation_level(IsolationLevel.READ_COMMITTED)
        except BaseException:
            await made.close()
            raise
        return made

    async def wait(self, gen: Generator[Any, Any, Any], interval: float = INTERVAL, *rest: Any, **more: Any) -> Any:
        if self.pgconn.transaction_status == TransactionStatus.INTRANS:
            bridge.raise_postponed()
        bounded = self._bounded(gen)
        try:
            return await waiting.wait_async(bounded, self.pgconn.socket, interval, *rest, **more)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit) as interrupt:
            if self.pgconn.transaction_status != TransactionStatus.ACTIVE:
                raise
            answer = await self._end(bounded, interrupt)
            if isinstance(interrupt, asyncio.CancelledError) and bridge.postpone(interrupt):
                return answer
            raise

    async def _end(self, gen: Generator[Any, Any, Any], interrupt: BaseException) -> Any:
        """Cancels the statement and reads its answer. Raises the interrupt unless the statement took effect."""
        try:
            async with asyncio.timeout(PROBE):
                with suppress(psycopg.Error):
                    await self.cancel_safe(timeout=PROBE)
                return await waiting.wait_async(gen, self.pgconn.socket, INTERVAL)
        except psycopg.Error:
            raise interrupt from None
        except (TimeoutError, asyncio.CancelledError):
            self.pgconn.finish()  # otherwise the next one would read this answer
            raise interrupt from None

    def _cancel(self) -> None:
        async def cancel() -> None:
            with suppress(psycopg.Error):
                await self.cancel_safe(timeout=PROBE)

        self._aside = asyncio.ensure_future(cancel())

    def _goes_on(self, waiting: Waiting) -> bool:
        """The probe runs in a thread, and the wait goes on meanwhile."""
        if waiting.hopeless:
            return False
        if self._aside is None or self._aside.done():
            self._aside = asyncio.get_running_loop().run_in_executor(None, _probe, waiting, self.backend)
        return True


def _probe(waiting: Waiting, backend: Backend) -> None:
    if not waiting.goes_on(backend):
        waiting.hopeless, waiting.look = True, 0.0
