"""Procrastinate, on psycopg. Its worker fetches one job at a time; a batch is what runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from procrastinate import App, PsycopgConnector, SyncPsycopgConnector
from procrastinate.types import JSONDict

from bench.peers.callers import Handled, Step, in_loop, in_threads
from bench.peers.peer import Done, Load
from bench.stage import Stage, plain

AT_ONCE = 10
"""Jobs that a worker runs at the same time; its connections are as many."""


class Procrastinate:
    version = f"Procrastinate {version('procrastinate')}"
    durability = "fsync at each publish, and twice for each job"

    def __init__(self, url: str, producer: App) -> None:
        self._url, self._producer = url, producer

    def empty(self, groups: int) -> None:  # noqa: ARG002  # a group is a task
        with plain(self._url) as connection:
            connection.execute("TRUNCATE procrastinate_jobs CASCADE")

    def publish(self, load: Load) -> Done:
        arguments: JSONDict = {"payload": "x" * load.bytes}
        tasks = [self._producer.configure_task(f"group-{n}", queue=f"group-{n}") for n in range(load.groups)]

        def publish() -> int:
            for task in tasks:
                if load.batch == 1:
                    task.defer(**arguments)
                else:
                    task.batch_defer(*[arguments] * load.batch)
            return load.batch

        steps: list[Step] = [publish] * load.callers
        return in_threads(steps, load.seconds)

    def consume(self, load: Load, group: int) -> Done:
        return in_loop(self._worked(load.seconds, group, AT_ONCE))

    def handle(self, load: Load) -> Done:
        return in_loop(self._worked(load.seconds, 0, load.callers))

    async def _worked(self, seconds: float, group: int, concurrency: int) -> Done:
        app = App(connector=PsycopgConnector(conninfo=self._url, max_size=AT_ONCE))
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        handled = Handled(lambda: loop.call_later(seconds, over.set))

        @app.task(name=f"group-{group}")
        async def handle(payload: str) -> None:  # noqa: ARG001
            handled.one()

        async with app.open_async():
            running = asyncio.create_task(
                app.run_worker_async(
                    queues=[f"group-{group}"],
                    wait=False,
                    concurrency=concurrency,
                    install_signal_handlers=False,
                    delete_jobs="always",
                )
            )
            timed = asyncio.create_task(over.wait())
            await asyncio.wait([running, timed], return_when=asyncio.FIRST_COMPLETED)
            done = handled.done()
            timed.cancel()
            running.cancel()  # it ends what runs
            await asyncio.gather(running, timed, return_exceptions=True)
            return done


@contextmanager
def opened(stage: Stage) -> Iterator[Procrastinate]:
    with stage.database() as url:
        producer = App(connector=SyncPsycopgConnector(conninfo=url, max_size=64))
        with producer.open():
            producer.schema_manager.apply_schema()
            yield Procrastinate(url, producer)
