"""PgQueuer, on a pool of asyncpg. Its worker runs as many jobs at once as a batch has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

import asyncpg  # type: ignore[import-untyped]
from pgqueuer import PgQueuer, Queries
from pgqueuer.types import QueueExecutionMode

from bench.peers.callers import Handled, in_loop, in_tasks
from bench.peers.peer import PREFETCH, Done, Load
from bench.stage import Stage

CONNECTIONS = 10


class Queuer:
    version = f"PgQueuer {version('pgqueuer')}"
    durability = "fsync at each publish; finished jobs are written together"

    def __init__(self, url: str) -> None:
        self._url = url

    def empty(self, groups: int) -> None:  # noqa: ARG002  # a group is an entrypoint
        in_loop(self._emptied())

    async def _emptied(self) -> None:
        async with self._pool(1) as pool:
            queries = Queries.from_asyncpg_pool(pool)
            await queries.clear_queue()
            await queries.clear_queue_log()

    async def install(self) -> None:
        async with self._pool(1) as pool:
            await Queries.from_asyncpg_pool(pool).install()

    def _pool(self, callers: int) -> asyncpg.Pool:
        most = min(callers, CONNECTIONS)
        return asyncpg.create_pool(self._url, min_size=most, max_size=most)

    def publish(self, load: Load) -> Done:
        names = [f"group-{group}" for group in range(load.groups)] * load.batch
        payloads, priorities = [b"x" * load.bytes] * len(names), [0] * len(names)

        async def work() -> Done:
            async with self._pool(load.callers) as pool:
                queries = Queries.from_asyncpg_pool(pool)

                async def publish() -> int:
                    await queries.enqueue(names, payloads, priorities)
                    return load.batch

                return await in_tasks([publish] * load.callers, load.seconds)

        return in_loop(work())

    def consume(self, load: Load, group: int) -> Done:
        return in_loop(self._worked(load, group, load.batch))

    def handle(self, load: Load) -> Done:
        return in_loop(self._worked(load, 0, PREFETCH))

    async def _worked(self, load: Load, group: int, batch: int) -> Done:
        loop = asyncio.get_running_loop()
        handled = Handled(lambda: loop.call_later(load.seconds, worker.qm.shutdown.set))

        async def handle(_: object) -> None:
            handled.one()

        async with self._pool(CONNECTIONS) as pool:
            worker = PgQueuer.from_asyncpg_pool(pool)
            worker.entrypoint(f"group-{group}")(handle)
            await worker.qm.run(batch_size=batch, mode=QueueExecutionMode.drain)
            return handled.done()


@contextmanager
def opened(stage: Stage) -> Iterator[Queuer]:
    with stage.database() as url:
        peer = Queuer(url)
        in_loop(peer.install())
        yield peer
