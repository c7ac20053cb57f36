"""RabbitMQ: a quorum queue of one node, publisher confirms that are under way together, prefetch, manual acks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from pathlib import Path

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage

from bench.peers.callers import AsyncStep, in_loop, in_tasks
from bench.peers.peer import PREFETCH, Done, Load, NotInstalled
from bench.peers.servers import free_port, home, running
from bench.stage import Stage

SCRIPT = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""Debian's; the one in the PATH would become the user `rabbitmq`, who may not read our directory."""
ALL = "everyone"
QUIET = 0.5
"""Seconds without a message, after which a queue is taken to be empty."""


class Rabbit:
    durability = "fsync at each publish (quorum queue of one node, confirms); acks are not confirmed"

    def __init__(self, port: int) -> None:
        self._url = f"amqp://guest:guest@127.0.0.1:{port}/?heartbeat=0"
        self._groups = 0
        self.version = ""

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AbstractConnection]:
        connection = await aio_pika.connect(self._url)
        try:
            yield connection
        finally:
            await connection.close()

    def answers(self) -> None:
        in_loop(self._answers())

    async def _answers(self) -> None:
        async with self._connected() as connection:
            told = connection.transport.connection.server_properties["version"]
            self.version = f"RabbitMQ {told} (aio-pika {version('aio-pika')})"

    def empty(self, groups: int) -> None:
        in_loop(self._emptied(groups))

    async def _emptied(self, groups: int) -> None:
        async with self._connected() as connection:
            channel = await connection.channel()
            for group in range(self._groups):
                await channel.queue_delete(f"group-{group}")
            self._groups = groups
            exchange = await channel.declare_exchange(ALL, "fanout", durable=True)
            for group in range(groups):
                queue = await channel.declare_queue(
                    f"group-{group}", durable=True, arguments={"x-queue-type": "quorum"}
                )
                await queue.bind(exchange)

    def publish(self, load: Load) -> Done:
        body = b"x" * load.bytes

        async def publisher(channel: AbstractChannel) -> AsyncStep:
            exchange = await channel.get_exchange(ALL, ensure=False)

            async def one() -> None:
                message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                await exchange.publish(message, "")  # until it is confirmed

            async def publish() -> int:
                if load.batch == 1:
                    await one()
                else:
                    await asyncio.gather(*[one() for _ in range(load.batch)])
                return load.batch

            return publish

        async def work() -> Done:
            async with self._connected() as connection:
                steps = [await publisher(await connection.channel()) for _ in range(load.callers)]
                return await in_tasks(steps, load.seconds)

        return in_loop(work())

    def consume(self, load: Load, group: int) -> Done:
        return in_loop(self._consumed(load, f"group-{group}", prefetch=2 * load.batch))

    def handle(self, load: Load) -> Done:
        return in_loop(self._consumed(load, "group-0", prefetch=PREFETCH))

    async def _consumed(self, load: Load, name: str, *, prefetch: int) -> Done:
        async with self._connected() as connection:
            steps = [await _taking(await connection.channel(), name, load.batch, prefetch) for _ in range(load.callers)]
            return await in_tasks(steps, load.seconds)


async def _taking(channel: AbstractChannel, name: str, batch: int, prefetch: int) -> AsyncStep:
    """Takes what has arrived, up to a batch, and acks all of it with its last message."""
    arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
    await channel.set_qos(prefetch_count=prefetch)
    queue = await channel.get_queue(name, ensure=False)
    await queue.consume(arrived.put)

    async def take() -> int:
        try:
            message = arrived.get_nowait() if arrived.qsize() else await asyncio.wait_for(arrived.get(), QUIET)
        except TimeoutError:
            return 0
        count = 1
        while count < batch and arrived.qsize():
            message = arrived.get_nowait()
            count += 1
        await message.ack(multiple=count > 1)
        return count

    return take


@contextmanager
def opened(_: Stage) -> Iterator[Rabbit]:
    if not SCRIPT.exists():
        raise NotInstalled("not installed: apt-get install rabbitmq-server")
    with home("rabbitmq") as files, _port_mapper(files) as mapper:
        port = free_port()
        env = _environment(files, mapper) | {
            "RABBITMQ_NODENAME": f"bench{port}@localhost",
            "RABBITMQ_NODE_PORT": str(port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_MNESIA_BASE": str(files / "data"),
            "RABBITMQ_LOG_BASE": str(files / "log"),
            "RABBITMQ_PID_FILE": str(files / "pid"),
            "RABBITMQ_CONFIG_FILE": str(files / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(files / "plugins"),
            # idle schedulers must not take the processors of what is measured beside it
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
        }
        peer = Rabbit(port)
        with running([str(SCRIPT)], port, peer.answers, files=files, env=env):
            yield peer


def _environment(files: Path, mapper: int) -> dict[str, str]:
    """Erlang's: a cookie of our own, and its port mapper on a port of our own, for nobody but this machine."""
    return {**os.environ, "HOME": str(files), "ERL_EPMD_PORT": str(mapper), "ERL_EPMD_ADDRESS": "127.0.0.1"}


@contextmanager
def _port_mapper(files: Path) -> Iterator[int]:
    """Erlang's nodes need one, and would start one that stays."""
    port = free_port()
    with running(["epmd"], port, files=files, env=_environment(files, port)):
        yield port
