"""Access to PostgreSQL from an event loop: the calls of `postgres.py` on a pool of asynchronous connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import psycopg
from psycopg_pool import AsyncConnectionPool

from custody.bridge import Entered, OneLoop, awaited
from custody.store.async_connecting import BoundedAsyncConnection
from custody.store.bridged import BridgedConnection
from custody.store.connecting import BoundedConnection
from custody.store.postgres import Database


class AsyncDatabase(Database):
    """A pool for one event loop. It is opened, used and closed by code that `bridge` runs; no call has a thread."""

    _waiting: AsyncConnectionPool[BoundedAsyncConnection]

    def _open(self, settings: dict[str, Any], **pool: Any) -> None:
        self._loop = OneLoop()
        self._waiting = AsyncConnectionPool(connection_class=BoundedAsyncConnection, check=self._require_living, **pool)
        first = awaited(BoundedAsyncConnection.connect(self.url, **settings))
        with Entered(first):
            self.pooled, self.isolation_default = first.pooled, first.isolation_default
            if first.pooled:
                with Entered(first.transaction()):
                    awaited(first.execute("SELECT 1"))
        try:
            awaited(self._waiting.open(wait=True, timeout=pool["timeout"]))
        except BaseException:
            awaited(self._waiting.close())
            raise

    async def _require_living(self, connection: BoundedAsyncConnection) -> None:
        if connection.stale:
            await connection.close()
            await self._waiting.drain()
            raise psycopg.OperationalError("the server has closed it")

    def _borrowed(self, within: float | None) -> AbstractContextManager[BoundedConnection]:
        return cast("AbstractContextManager[BoundedConnection]", self._bridged(within))

    @contextmanager
    def _bridged(self, within: float | None) -> Iterator[BridgedConnection]:
        self._loop.require()
        with Entered(self._waiting.connection(timeout=within)) as connection:
            yield BridgedConnection(connection)

    def _drain(self) -> None:
        awaited(self._waiting.drain())

    def close(self) -> None:
        awaited(self._waiting.close())

    def connections(self) -> tuple[int, int, int, int]:
        stats = self._waiting.get_stats()
        idle = stats["pool_available"]
        return stats["pool_size"] - idle, idle, stats["pool_max"], stats.get("requests_waiting", 0)
