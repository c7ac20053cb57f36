"""Redis Streams: pipelined XADD, consumer groups, the ack of a batch in one round trip with the next read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import redis

from bench.peers.callers import Step, in_threads
from bench.peers.peer import PREFETCH, Done, Load
from bench.peers.servers import free_port, home, program, running
from bench.stage import Stage

STREAM = "orders"
DURABILITY = {
    "always": "fsync at each publish and each ack",
    "everysec": "fsync once a second: a crash of the machine may lose the last second",
}


class Streams:
    def __init__(self, port: int, fsync: str) -> None:
        self._port = port
        self.durability = DURABILITY[fsync]
        with self._client() as client:
            self.version = f"Redis {client.info('server')['redis_version']}, appendfsync {fsync}"

    def _client(self) -> redis.Redis:
        return redis.Redis(port=self._port)

    def empty(self, groups: int) -> None:
        with self._client() as client:
            client.flushall()
            for group in range(groups):
                client.xgroup_create(STREAM, f"group-{group}", id="0", mkstream=True)

    def publish(self, load: Load) -> Done:
        fields: dict[Any, Any] = {"payload": b"x" * load.bytes}

        def publisher(client: redis.Redis) -> Step:
            def publish() -> int:
                pipe = client.pipeline(transaction=False)
                for _ in range(load.batch):
                    pipe.xadd(STREAM, fields)
                return len(pipe.execute())

            return publish

        return self._by_clients(load, publisher)

    def consume(self, load: Load, group: int) -> Done:
        name = f"group-{group}"

        def consumer(client: redis.Redis) -> Step:
            me = f"consumer-{id(client)}"
            taken: list[bytes] = []

            def consume() -> int:
                nonlocal taken
                pipe = client.pipeline(transaction=False)
                if taken:
                    pipe.xack(STREAM, name, *taken)
                pipe.xreadgroup(name, me, {STREAM: ">"}, count=load.batch)
                found = pipe.execute()[-1]
                acked, taken = len(taken), _ids(found)
                return acked or (consume() if taken else 0)

            return consume

        return self._by_clients(load, consumer)

    def handle(self, load: Load) -> Done:
        return self.consume(Load(bytes=load.bytes, batch=PREFETCH, callers=load.callers, seconds=load.seconds), 0)

    def _by_clients(self, load: Load, caller: Callable[[redis.Redis], Step]) -> Done:
        with ExitStack() as clients:
            steps = [caller(clients.enter_context(self._client())) for _ in range(load.callers)]
            return in_threads(steps, load.seconds)


def _ids(found: Any) -> list[bytes]:
    """The ids of the entries that a read of one stream returned."""
    streams = found.items() if isinstance(found, dict) else found or []
    return [entry[0] for _, entries in streams for entry in entries]


@contextmanager
def opened(_: Stage, *, fsync: str) -> Iterator[Streams]:
    server, port = program("redis-server", "redis-server"), free_port()
    with home("redis") as files:
        command = [server, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(files), "--save", ""]
        command += ["--appendonly", "yes", "--appendfsync", fsync]
        with running(command, port, redis.Redis(port=port).ping, files=files):
            yield Streams(port, fsync)


always = partial(opened, fsync="always")
everysec = partial(opened, fsync="everysec")
