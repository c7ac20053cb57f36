"""NATS JetStream: a stream in files, publishes that are under way together, durable pull consumers."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib.metadata import version

import nats
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, StorageType
from nats.js.errors import NotFoundError

from bench.peers.callers import AsyncStep, in_loop, in_tasks
from bench.peers.peer import PREFETCH, Done, Load, NotInstalled
from bench.peers.servers import free_port, home, program, running
from bench.stage import Stage

STREAM = "orders"
DURABILITY = {
    None: "fsync every two minutes, its default: a crash of the machine may lose what was confirmed since",
    "always": "fsync at each publish; the last ack of a batch is confirmed",
}


class JetStream:
    def __init__(self, port: int, release: str, fsync: str | None) -> None:
        self._url = f"nats://127.0.0.1:{port}"
        self.version = f"NATS {release}, sync_interval {fsync or '2m'} (client {version('nats-py')})"
        self.durability = DURABILITY[fsync]

    @asynccontextmanager
    async def _stream(self) -> AsyncIterator[JetStreamContext]:
        connection = await nats.connect(self._url)
        try:
            yield connection.jetstream(publish_async_max_pending=100_000)
        finally:
            await connection.close()

    def answers(self) -> None:
        in_loop(self._answers())

    async def _answers(self) -> None:
        async with self._stream() as js:
            await js.account_info()

    def empty(self, groups: int) -> None:
        in_loop(self._emptied(groups))

    async def _emptied(self, groups: int) -> None:
        async with self._stream() as js:
            with suppress(NotFoundError):
                await js.delete_stream(STREAM)
            await js.add_stream(name=STREAM, subjects=[STREAM], storage=StorageType.FILE)
            for group in range(groups):
                await js.add_consumer(STREAM, ConsumerConfig(durable_name=f"group-{group}", max_ack_pending=100_000))

    def publish(self, load: Load) -> Done:
        payload = b"x" * load.bytes

        async def work() -> Done:
            async with self._stream() as js:

                async def publish() -> int:
                    if load.batch == 1:
                        await js.publish(STREAM, payload)
                    else:
                        await asyncio.gather(*[await js.publish_async(STREAM, payload) for _ in range(load.batch)])
                    return load.batch

                return await in_tasks([publish] * load.callers, load.seconds)

        return in_loop(work())

    def consume(self, load: Load, group: int) -> Done:
        async def work() -> Done:
            async with self._stream() as js:
                steps = [await self._taking(js, f"group-{group}", load.batch) for _ in range(load.callers)]
                return await in_tasks(steps, load.seconds)

        return in_loop(work())

    async def _taking(self, js: JetStreamContext, durable: str, batch: int) -> AsyncStep:
        subscription = await js.pull_subscribe_bind(durable, STREAM)

        async def take() -> int:
            try:
                messages = await subscription.fetch(batch, timeout=0.5)
            except TimeoutError:  # nats-py has one of its own, which is one of these
                return 0
            if not messages:
                return 0
            for message in messages[:-1]:
                await message.ack()
            await messages[-1].ack_sync()  # it comes after the others, so all have arrived
            return len(messages)

        return take

    def handle(self, load: Load) -> Done:
        return self.consume(Load(bytes=load.bytes, batch=PREFETCH, callers=load.callers, seconds=load.seconds), 0)


@contextmanager
def opened(_: Stage, *, fsync: str | None) -> Iterator[JetStream]:
    server, port = program("nats-server", "nats-server"), free_port()
    told = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
    release = told.split()[-1].removeprefix("v")
    with home("nats") as files:
        settings = files / "nats.conf"
        lines = [f'store_dir: "{files}"', *([f"sync_interval: {fsync}"] if fsync else [])]
        settings.write_text(f"host: 127.0.0.1\nport: {port}\njetstream {{\n  {chr(10).join(lines)}\n}}\n")
        checked = subprocess.run([server, "-t", "-c", str(settings)], capture_output=True, text=True, check=False)
        if checked.returncode != 0 and fsync and re.search("sync_interval", checked.stdout + checked.stderr):
            raise NotInstalled(f"nats-server {release} has no sync_interval: install 2.10 or newer")
        peer = JetStream(port, release, fsync)
        with running([server, "-c", str(settings)], port, peer.answers, files=files):
            yield peer


usual = partial(opened, fsync=None)
always = partial(opened, fsync="always")
